// fusedops_native.SharedChannel: collectives of the processes of one machine through their memory.
//
// The class checks its arguments and keeps the tensors alive; the protocol is that of
// collectives.h. A rank that waits sleeps after a short while, looks whether the others
// still run, and gives up after the time that the process group was given.
#include <cmath>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <torch/custom_class.h>
#include <torch/library.h>

#include "../../common/binding.h"
#include "collectives.h"

namespace fusedops {
namespace {

#if defined(__linux__)

SharedKind kind_of(const std::string& name) {
  if (name == "all_reduce") return SharedKind::all_reduce;
  if (name == "all_gather") return SharedKind::all_gather;
  if (name == "reduce_scatter") return SharedKind::reduce_scatter;
  if (name == "all_to_all") return SharedKind::all_to_all;
  if (name == "shift") return SharedKind::shift;
  if (name == "broadcast") return SharedKind::broadcast;
  TORCH_CHECK_VALUE(name == "sync", "SharedChannel: there is no collective ", name);
  return SharedKind::sync;
}

void sum(const SharedSum& parts) {
  FUSEDOPS_CALL_ISA(shared_sum, parts);
}

void for_pieces(int64_t begin, int64_t end, const SharedCollectives::PieceFunction& f) {
  const auto run = [&](int64_t from, int64_t to) {
    for (int64_t piece = from; piece < to; ++piece) f(piece);
  };
  if (end - begin < 4 || at::get_num_threads() == 1 || at::in_parallel_region()) {
    run(begin, end);
  } else {
    at::parallel_for(begin, end, 2, run);
  }
}

class SharedChannel : public torch::CustomClassHolder {
 public:
  SharedChannel(int64_t rank, int64_t ranks)
      : collectives_(checked_rank(rank, ranks), ranks, {sum, for_pieces}) {}

  // The number of this process' file, or -1 where there is no such memory.
  int64_t descriptor() { return own().is_mapped() ? own().descriptor() : -1; }

  void write_secret(int64_t secret) {
    TORCH_CHECK(own().is_mapped(), "SharedChannel: this process has no shared memory");
    own().secret() = secret;
  }

  // Opens the rings of the others; false when one cannot be had.
  bool connect(const std::vector<int64_t>& processes, const std::vector<int64_t>& descriptors,
               const std::vector<int64_t>& secrets) {
    const auto count = static_cast<size_t>(ranks());
    TORCH_CHECK_VALUE(
        processes.size() == count && descriptors.size() == count && secrets.size() == count,
        "SharedChannel: connect takes a number for each of the ", ranks(), " ranks");
    TORCH_CHECK(!is_connected_, "SharedChannel: connect was called before");
    TORCH_CHECK(own().is_mapped(), "SharedChannel: this process has no shared memory");
    for (int64_t peer = 0; peer < ranks(); ++peer) {
      if (peer != collectives_.rank()) {
        collectives_.connect(peer, std::make_unique<Ring>(processes[peer], descriptors[peer]));
        if (!collectives_.ring(peer)->is_mapped()) return false;
      }
      if (collectives_.ring(peer)->secret() != secrets[peer]) return false;
    }
    return is_connected_ = true;
  }

  // Starts a collective and returns its number. Both tensors are left alone until it is finished.
  // `text` is the call in words, the same on all ranks. `source` is the rank that a broadcast or a
  // shift reads; of a shift, each rank names another one.
  int64_t start(const std::string& name, const std::string& text, const at::Tensor& input,
                const at::Tensor& output, int64_t source) {
    check_is_open();
    TORCH_CHECK_VALUE(source >= 0 && source < ranks(), "SharedChannel: no rank ", source);
    return collectives_.start(call(kind_of(name), text, input, output, source));
  }

  // Starts an exchange of different lengths and returns its number; the tensors have one dim, and
  // the elements for or from each rank lie one after the other. `longest` elements are the most
  // that any rank sends to another.
  int64_t start_exchange(const std::string& text, const at::Tensor& input, const at::Tensor& output,
                         const std::vector<int64_t>& sends, const std::vector<int64_t>& receives,
                         int64_t longest) {
    check_is_open();
    const int64_t size = static_cast<int64_t>(input.element_size());
    TORCH_CHECK_VALUE(longest >= 0 && longest <= INT64_MAX / size,
                      "SharedChannel: no exchange has ", longest, " elements");
    auto sent = bytes_of_parts("sends", sends, input, longest);
    auto received = bytes_of_parts("receives", receives, output, longest);
    SharedCall exchange = call(SharedKind::exchange, text, input, output, 0);
    exchange.sends = std::move(sent);
    exchange.receives = std::move(received);
    exchange.longest = longest * size;
    return collectives_.start(exchange);
  }

  // Waits until collective `number`, and all that were started before it, are finished; for each
  // piece of another rank at most `timeout` seconds.
  void finish(int64_t number, double timeout) {
    TORCH_CHECK_VALUE(number >= 0 && number < collectives_.started(),
                      "SharedChannel: no collective ", number, " was started");
    TORCH_CHECK_VALUE(timeout >= 0 && std::isfinite(timeout),
                      "SharedChannel: a timeout must be seconds, got ", timeout);
    check_process();
    raise(collectives_.finish(number, timeout), "");
  }

 private:
  Ring& own() { return collectives_.own(); }
  int64_t ranks() const { return collectives_.ranks(); }

  static int64_t checked_rank(int64_t rank, int64_t ranks) {
    TORCH_CHECK_VALUE(ranks >= 2 && ranks <= kMaxSharedRanks && rank >= 0 && rank < ranks,
                      "SharedChannel: rank ", rank, " of ", ranks, " ranks; there may be 2 to ",
                      kMaxSharedRanks);
    return rank;
  }

  void check_process() {
    TORCH_CHECK(own().is_creator(),
                "SharedChannel: a forked process cannot use the channel of its parent");
  }

  void check_is_open() {
    TORCH_CHECK(is_connected_, "SharedChannel: start was called before connect returned true");
    check_process();
    raise(collectives_.failure(), "the group communicates no more: ");
  }

  static void raise(const SharedCollectives::Failure& failure, const std::string& prefix) {
    TORCH_CHECK_VALUE(failure.why != ChannelFailure::disagreement, prefix, failure.reason);
    TORCH_CHECK(failure.why == ChannelFailure::none, prefix, failure.reason);
  }

  std::vector<int64_t> bytes_of_parts(const char* name, std::vector<int64_t> counts,
                                      const at::Tensor& tensor, int64_t longest) const {
    TORCH_CHECK_VALUE(static_cast<int64_t>(counts.size()) == ranks(), "SharedChannel: ", name,
                      " must have a number for each of the ", ranks(), " ranks");
    int64_t left = tensor.numel();
    for (auto& count : counts) {
      TORCH_CHECK_VALUE(count >= 0 && count <= longest && count <= left, "SharedChannel: ", name,
                        " has ", count, " elements for a rank, more than there are or than ",
                        longest);
      left -= count;
      count *= static_cast<int64_t>(tensor.element_size());
    }
    TORCH_CHECK_VALUE(left == 0 && counts[static_cast<size_t>(collectives_.rank())] == 0,
                      "SharedChannel: ", name, " must be all elements, none for the own rank");
    return counts;
  }

  SharedCall call(SharedKind kind, const std::string& text, const at::Tensor& input,
                  const at::Tensor& output, int64_t source) const {
    for (const auto& tensor : {input, output}) {
      TORCH_CHECK_VALUE(tensor.defined() && tensor.layout() == at::kStrided && tensor.is_cpu() &&
                            tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg(),
                        "SharedChannel: tensors must be contiguous and on the CPU");
    }
    TORCH_CHECK_VALUE(input.scalar_type() == output.scalar_type(),
                      "SharedChannel: tensors must be of one dtype, got ", input.scalar_type(),
                      " and ", output.scalar_type());
    const bool divided = kind == SharedKind::reduce_scatter || kind == SharedKind::all_to_all;
    const auto bytes = static_cast<int64_t>(input.nbytes());
    const int64_t expected = kind == SharedKind::all_gather       ? bytes * ranks()
                             : kind == SharedKind::reduce_scatter ? bytes / ranks()
                                                                  : bytes;
    TORCH_CHECK_VALUE(
        (!divided || input.numel() % ranks() == 0) &&
            (kind == SharedKind::exchange || static_cast<int64_t>(output.nbytes()) == expected),
        "SharedChannel: an output of ", output.nbytes(), " bytes does not fit ", bytes,
        " bytes on each of ", ranks(), " ranks");
    check_overlap(kind, input, output);
    const bool sums = kind == SharedKind::all_reduce || kind == SharedKind::reduce_scatter;
    return {kind,
            input.const_data_ptr(),
            output.mutable_data_ptr(),
            bytes,
            static_cast<int64_t>(input.element_size()),
            sums ? dtype_of(input) : DType::f32,
            static_cast<int64_t>(input.scalar_type()),
            source,
            text,
            std::make_shared<std::pair<at::Tensor, at::Tensor>>(input, output)};
  }

  // A result that is written before all of the input was read would change what others get.
  void check_overlap(SharedKind kind, const at::Tensor& input, const at::Tensor& output) const {
    const auto from = reinterpret_cast<uintptr_t>(input.const_data_ptr());
    const auto to = reinterpret_cast<uintptr_t>(output.const_data_ptr());
    if (from >= to + output.nbytes() || to >= from + input.nbytes()) return;
    const bool same = kind == SharedKind::all_reduce || kind == SharedKind::broadcast;
    const bool part = kind == SharedKind::all_gather;
    const uintptr_t offset = part ? collectives_.rank() * input.nbytes() : 0;
    TORCH_CHECK_VALUE((same || part) && from == to + offset,
                      "SharedChannel: the input lies in the output, at another place than its own");
  }

  SharedCollectives collectives_;
  bool is_connected_ = false;
};

TORCH_LIBRARY_FRAGMENT(fusedops_native, m) {
  m.class_<SharedChannel>("SharedChannel")
      .def(torch::init<int64_t, int64_t>())
      .def("descriptor", &SharedChannel::descriptor)
      .def("write_secret", &SharedChannel::write_secret)
      .def("connect", &SharedChannel::connect)
      .def("start", &SharedChannel::start)
      .def("start_exchange", &SharedChannel::start_exchange)
      .def("finish", &SharedChannel::finish);
}

#endif

}  // namespace
}  // namespace fusedops
