// What g++ calls from kernels that are compiled with -fsanitize=thread: a function before each load
// and store; and with -fsanitize=alignment,bounds, ...: one where an access is misaligned, an index
// outside of an array, a shift or a sum undefined. The names and arguments are those of the
// compiler's run-time libraries (libtsan, libubsan), which are not linked.
#include "machine.h"

using cuda_on_host::touch;

#define FUSEDOPS_CALLER __builtin_return_address(0)
#define FUSEDOPS_TOUCH(name, size, writes)                                 \
  extern "C" void __tsan_##name(void* at) {                                \
    touch(reinterpret_cast<uintptr_t>(at), size, writes, FUSEDOPS_CALLER); \
  }
#define FUSEDOPS_TOUCH_SIZE(size)                   \
  FUSEDOPS_TOUCH(read##size, size, false)           \
  FUSEDOPS_TOUCH(write##size, size, true)           \
  FUSEDOPS_TOUCH(unaligned_read##size, size, false) \
  FUSEDOPS_TOUCH(unaligned_write##size, size, true)

FUSEDOPS_TOUCH_SIZE(1)
FUSEDOPS_TOUCH_SIZE(2)
FUSEDOPS_TOUCH_SIZE(4)
FUSEDOPS_TOUCH_SIZE(8)
FUSEDOPS_TOUCH_SIZE(16)

extern "C" {
void __tsan_read_range(void* at, size_t size) {
  touch(reinterpret_cast<uintptr_t>(at), size, false, FUSEDOPS_CALLER);
}
void __tsan_write_range(void* at, size_t size) {
  touch(reinterpret_cast<uintptr_t>(at), size, true, FUSEDOPS_CALLER);
}
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}

// The first thing that each handler of the other kind is given.
struct SourceLocation {
  const char* file;
  uint32_t line;
  uint32_t column;
};
}

namespace {

void refuse(const SourceLocation* location, const char* what) {
  if (!cuda_on_host::running().any) return;
  const std::string file = location->file;
  cuda_on_host::fail(std::string(what) + " at " + file.substr(file.rfind('/') + 1) + ":" +
                     std::to_string(location->line));
}

}  // namespace

#define FUSEDOPS_HANDLER(name, what)                                      \
  extern "C" void __ubsan_handle_##name(const SourceLocation* location) { \
    refuse(location, what);                                               \
  }
FUSEDOPS_HANDLER(type_mismatch_v1, "misaligned access")
FUSEDOPS_HANDLER(out_of_bounds, "index outside of an array")
FUSEDOPS_HANDLER(shift_out_of_bounds, "undefined shift")
FUSEDOPS_HANDLER(add_overflow, "overflow of a sum")
FUSEDOPS_HANDLER(sub_overflow, "overflow of a difference")
FUSEDOPS_HANDLER(mul_overflow, "overflow of a product")
FUSEDOPS_HANDLER(negate_overflow, "overflow of a negation")
FUSEDOPS_HANDLER(divrem_overflow, "undefined division")
