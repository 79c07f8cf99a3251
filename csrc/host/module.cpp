// The Python module (pybind11) of code that needs no torch.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "arena.h"

namespace fusedops {

namespace py = pybind11;

void bind_step_queue(py::module_& m);

namespace {

py::dict place(const std::vector<int64_t>& lower, const std::vector<int64_t>& upper,
               const std::vector<int64_t>& size, const std::vector<int64_t>& pinned,
               int64_t capacity, double seconds) {
  std::vector<arena::Buffer> buffers(size.size());
  for (size_t i = 0; i < size.size(); ++i) buffers[i] = {lower[i], upper[i], size[i], pinned[i]};
  arena::Placement placement;
  {
    const py::gil_scoped_release released;
    placement = arena::place(buffers, capacity, seconds);
  }
  py::dict result;
  result["offsets"] = placement.offsets;
  result["height"] = placement.height;
  result["bound"] = placement.bound;
  return result;
}

}  // namespace
}  // namespace fusedops

PYBIND11_MODULE(host, m) {
  m.doc() = "Threads of an offloaded optimizer, identities of objects, and offsets of an arena.";
  fusedops::bind_step_queue(m);
  m.def("place", &fusedops::place, pybind11::arg("lower"), pybind11::arg("upper"),
        pybind11::arg("size"), pybind11::kw_only(), pybind11::arg("pinned"),
        pybind11::arg("capacity"), pybind11::arg("seconds"));
}
