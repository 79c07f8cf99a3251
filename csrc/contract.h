// The evaluator of operator contracts: shapes and dtypes of the arguments before a kernel runs.
//
// fusedops/_core/contract.py has the language, checks the same in Python and writes the message of
// a refusal. This one only allows or refuses, in a tenth of a microsecond. The code that
// fusedops/_core/_contract_code.py writes is read once.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include <ATen/core/ivalue.h>

namespace fusedops {

class Contract {
 public:
  Contract(const std::vector<int64_t>& code, std::vector<std::string> words,
           std::vector<double> bounds);
  ~Contract();

  // Whether the arguments, in the order of the stack, satisfy the contract.
  bool allows(at::ArrayRef<c10::IValue> arguments) const;

 private:
  struct Rules;
  std::unique_ptr<Rules> rules_;
};

// The contract of an operator (fusedops::<name>), or null. Lives as long as the process.
const Contract* contract_of(const std::string& name);

// What the router says to Python, which it calls next in this thread: whether it has checked the
// call to its contract.
enum class Verdict : int64_t { none, allowed, refused };
void set_verdict(Verdict verdict);

}  // namespace fusedops
