// Small helpers shared by the generic boxed kernels (autograd.cpp, router.cpp).
#pragma once

#include <string>

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <ATen/core/stack.h>
#include <torch/library.h>

namespace fusedops {

// The operator fusedops::<name>, fusedops_cpp::<name>, ...; throws when it is not defined.
inline c10::OperatorHandle find_operator(const std::string& space, const std::string& name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow((space + "::" + name).c_str(), "");
}

// Installs a boxed kernel for fusedops::<name> under a dispatch key, for the life of the process.
template <typename Functor>
void install(const std::string& name, c10::DispatchKey key, std::unique_ptr<Functor> functor) {
  static auto* library =
      new torch::Library(torch::Library::IMPL, "fusedops", std::nullopt, __FILE__, __LINE__);
  library->impl(name.c_str(),
                torch::dispatch(key, torch::CppFunction::makeFromBoxedFunctor(std::move(functor))));
}

}  // namespace fusedops
