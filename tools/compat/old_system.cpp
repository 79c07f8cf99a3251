// What code that g++ 12 compiles on glibc 2.36 calls and a system with glibc 2.28 and the libstdc++
// of gcc 8 does not have, by means of what it has. Linked into the libraries of a wheel
// (tools/portable.py); hidden, so that nobody else finds these.
#include <sys/stat.h>

#include <cstddef>
#include <exception>
#include <new>

#define HIDDEN __attribute__((visibility("hidden")))

// glibc 2.32: whether the process has one thread only. "No" is always safe.
extern "C" HIDDEN char __libc_single_threaded = 0;

// glibc 2.33; before, a macro called this with a version.
extern "C" int __fxstat(int version, int file, struct stat* result);
extern "C" HIDDEN int fstat(int file, struct stat* result) {
#if defined(__x86_64__)
  return __fxstat(1, file, result);
#else
  return __fxstat(0, file, result);
#endif
}

// gcc 12.
namespace std {
HIDDEN void __throw_bad_array_new_length() {
  throw bad_array_new_length();
}
}  // namespace std

// gcc 11 and older count the references of an exception_ptr in its copy constructor and destructor,
// which gcc 12 has inline.
extern "C" void copy_exception(void* to, const void* from) asm(
    "_ZNSt15__exception_ptr13exception_ptrC1ERKS0_");
extern "C" void drop_exception(void* object) asm("_ZNSt15__exception_ptr13exception_ptrD1Ev");

extern "C" HIDDEN void add_reference(void* self) asm(
    "_ZNSt15__exception_ptr13exception_ptr9_M_addrefEv");
extern "C" HIDDEN void add_reference(void* self) {
  alignas(void*) std::byte copy[sizeof(std::exception_ptr)];
  copy_exception(copy, self);  // and never dropped
}

extern "C" HIDDEN void release_reference(void* self) asm(
    "_ZNSt15__exception_ptr13exception_ptr10_M_releaseEv");
extern "C" HIDDEN void release_reference(void* self) {
  drop_exception(self);
}
