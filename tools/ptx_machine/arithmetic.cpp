// Instructions that compute a register of each lane from registers of the same lane.
#include <cmath>
#include <limits>

#include "instructions.h"

namespace ptx {
namespace {

using u16 = uint16_t;
using u32 = uint32_t;
using u64 = uint64_t;
using s16 = int16_t;
using s32 = int32_t;
using s64 = int64_t;

struct Bf16 {
  u16 bits;
};
struct Bf16x2 {
  u16 low, high;
};
struct F32x2 {
  float low, high;
};
struct Predicate {
  bool value;
};

template <typename T>
T from(u64 bits) {
  if constexpr (std::is_same_v<T, Predicate>) {
    return {bool(bits & 1)};
  } else {
    T value;
    std::memcpy(&value, &bits, sizeof(T));
    return value;
  }
}
template <typename T>
u64 bits(T value) {
  if constexpr (std::is_same_v<T, Predicate>) {
    return value.value;
  } else if constexpr (std::is_same_v<T, float>) {
    // The NaN of a GPU; the host's have the bits of an operand.
    return value == value ? std::bit_cast<u32>(value) : 0x7fffffffu;
  } else {
    u64 result = 0;
    std::memcpy(&result, &value, sizeof(T));
    return result;
  }
}

float wide(Bf16 value) {
  return from<float>(u64(value.bits) << 16);
}
float number(Bf16 value) {
  return wide(value);
}
float number(_Float16 value) {
  return float(value);
}
Bf16 narrow(float value) {
  return {bfloat16(value)};
}

// A handler that calls F with the operands behind the first, of the types of its parameters.
template <auto F, typename Result, typename... Arguments>
struct Lanes {
  static void run(Block& block, Warp& warp, const Instruction& instruction, uint32_t lanes) {
    call(block, warp, instruction, lanes, std::index_sequence_for<Arguments...>());
  }
  template <size_t... I>
  static void call(Block& block, Warp& warp, const Instruction& instruction, uint32_t lanes,
                   std::index_sequence<I...>) {
    const auto& operands = instruction.operands;
    for (int lane = 0; lane < kLanes; ++lane) {
      if (!(lanes >> lane & 1)) continue;
      const Result result = F(from<Arguments>(block.value(warp, operands[I + 1], lane))...);
      block.set(warp, operands[0], lane, bits(result));
      // setp %p|%q: the second one is the opposite.
      if constexpr (std::is_same_v<Result, Predicate>)
        if (operands[0].second >= 0) warp.registers[operands[0].second][lane] = !result.value;
    }
  }
};
template <typename Signature>
struct Typed;
template <typename Result, typename... Arguments>
struct Typed<Result (*)(Arguments...)> {
  template <auto F>
  static constexpr Entry entry{Lanes<F, Result, Arguments...>::run, sizeof...(Arguments) + 1};
};
template <auto F>
constexpr Entry lanes = Typed<decltype(+F)>::template entry<F>;

template <typename T>
T flushed(T x) {
  return std::fpclassify(x) == FP_SUBNORMAL ? std::copysign(T(0), x) : x;
}
constexpr float kNan = std::bit_cast<float>(0x7fffffffu);  // the canonical one

// min and max give the other operand for a NaN, and -0 is less than 0.
float larger(float a, float b) {
  if (std::isnan(a)) return std::isnan(b) ? kNan : b;
  if (std::isnan(b)) return a;
  if (a == b) return std::signbit(a) ? b : a;
  return std::max(a, b);
}
float smaller(float a, float b) {
  if (std::isnan(a)) return std::isnan(b) ? kNan : b;
  if (std::isnan(b)) return a;
  if (a == b) return std::signbit(a) ? a : b;
  return std::min(a, b);
}

// a * b + c with one rounding: the product is exact in a double, and the steps to double and to
// float round to odd, so that nothing is lost that decides how the last one rounds.
Bf16 fused(Bf16 a, Bf16 b, Bf16 c) {
  const double product = double(wide(a)) * wide(b), added = wide(c);
  double total = product + added;
  if (!std::isfinite(total)) return narrow(float(total));
  const double part = total - product;
  const double error = (product - (total - part)) + (added - part);
  if (error != 0 && !(bits(total) & 1))
    total = std::nextafter(total, std::copysign(std::numeric_limits<double>::infinity(), error));
  float result = float(total);
  if (!std::isfinite(result) || result == total) return narrow(result);
  if (std::fabs(double(result)) > std::fabs(total)) result = std::nextafter(result, 0.0f);
  return narrow(from<float>(bits(result) | 1));
}
_Float16 half(float value) {
  return std::isnan(value) ? from<_Float16>(0x7fff) : _Float16(value);
}

// Division by zero gives all bits; the least number divided by -1 is itself.
template <typename T>
T quotient(T a, T b) {
  if (b == 0) return T(-1);
  return std::is_signed_v<T> && b == T(-1) ? T(-std::make_unsigned_t<T>(a)) : T(a / b);
}
template <typename T>
T remainder(T a, T b) {
  if (b == 0) return a;
  return std::is_signed_v<T> && b == T(-1) ? T(0) : T(a % b);
}
template <typename T>
T shifted_left(T a, u32 by) {
  return by >= sizeof(T) * 8 ? 0 : T(a << by);
}
template <typename T>
T shifted_right(T a, u32 by) {
  const u32 most = sizeof(T) * 8 - 1;
  return by > most ? (std::is_signed_v<T> ? T(a >> most) : T(0)) : T(a >> by);
}
template <typename T>
T bit_field(T value, u32 begin, u32 length) {
  begin &= 255;
  length &= 255;
  if (length == 0) return 0;
  T result = 0;
  const u32 sign_at = std::min(begin + length - 1, 31u);
  const bool sign = std::is_signed_v<T> && (value >> sign_at & 1);
  for (u32 i = 0; i < 32; ++i) {
    const bool bit = i < length && begin + i < 32 ? (value >> (begin + i) & 1) : sign;
    result |= T(u32(bit) << i);
  }
  return result;
}
u32 permuted(u32 a, u32 b, u32 selector) {
  const u64 both = u64(b) << 32 | a;
  u32 result = 0;
  for (int i = 0; i < 4; ++i) {
    const u32 choice = selector >> 4 * i & 15;
    u32 byte = both >> 8 * (choice & 7) & 255;
    if (choice & 8) byte = byte & 128 ? 255 : 0;
    result |= byte << 8 * i;
  }
  return result;
}
u32 funnel_shifted(u32 low, u32 high, u32 by) {
  by &= 31;
  return by ? high << by | low >> (32 - by) : high;
}
// Clamped. A NaN gives zero, and the least number if source or result have 64 bits.
template <typename T, typename Float>
T rounded_to_zero(Float value) {
  const double x = value;
  constexpr bool is_long = sizeof(T) == 8 || sizeof(Float) == 8;
  if (std::isnan(x)) return is_long ? T(u64(1) << (8 * sizeof(T) - 1)) : T(0);
  if (x <= double(std::numeric_limits<T>::min())) return std::numeric_limits<T>::min();
  if (x >= double(std::numeric_limits<T>::max())) return std::numeric_limits<T>::max();
  return T(x);
}
// A multiply-add that is rounded down.
float fused_down(float a, float b, float c) {
  const double product = double(a) * b, sum = product + c, back = sum - product;
  const double lost = (product - (sum - back)) + (c - back);
  const float result = float(sum);
  const bool above = result > sum || (result == sum && lost < 0);
  return above ? std::nextafter(result, -std::numeric_limits<float>::infinity()) : result;
}
// The hardware computes the upper half of the bits.
double rough_inverse(double x) {
  return flushed(std::bit_cast<double>(bits(1.0 / flushed(x)) & 0xffffffff00000000));
}
// Above 2^126 the approximate reciprocal of the divisor is 0.
float rough_quotient(float a, float b) {
  return std::fabs(b) > 0x1p126f && std::isfinite(b) ? 0.0f * a : a / b;
}
template <auto F>
F32x2 pairs(F32x2 a, F32x2 b) {
  return {F(a.low, b.low), F(a.high, b.high)};
}
constexpr auto plus = [](float a, float b) { return a + b; };
constexpr auto minus = [](float a, float b) { return a - b; };
constexpr auto times = [](float a, float b) { return a * b; };

template <typename T>
void integers(Table& table, const std::string& s, const std::string& u, const std::string& b) {
  using U = std::make_unsigned_t<T>;
  table["add." + s] = table["add." + u] = lanes<[](U a, U b) { return U(a + b); }>;
  table["sub." + s] = table["sub." + u] = lanes<[](U a, U b) { return U(a - b); }>;
  table["mul.lo." + s] = table["mul.lo." + u] = lanes<[](U a, U b) { return U(u64(a) * b); }>;
  table["mad.lo." + s] = table["mad.lo." + u] =
      lanes<[](U a, U b, U c) { return U(u64(a) * b + c); }>;
  table["and." + b] = lanes<[](U a, U b) { return U(a & b); }>;
  table["or." + b] = lanes<[](U a, U b) { return U(a | b); }>;
  table["xor." + b] = lanes<[](U a, U b) { return U(a ^ b); }>;
  table["not." + b] = lanes<[](U a) { return U(~a); }>;
  table["shl." + b] = lanes<[](U a, u32 by) { return shifted_left<U>(a, by); }>;
  table["shr." + u] = table["shr." + b] =
      lanes<[](U a, u32 by) { return shifted_right<U>(a, by); }>;
  table["shr." + s] = lanes<[](T a, u32 by) { return shifted_right<T>(a, by); }>;
  table["neg." + s] = lanes<[](U a) { return U(-a); }>;
  table["abs." + s] = lanes<[](T a) { return a < 0 ? T(-U(a)) : a; }>;
  table["min." + s] = lanes<[](T a, T b) { return std::min(a, b); }>;
  table["max." + s] = lanes<[](T a, T b) { return std::max(a, b); }>;
  table["min." + u] = lanes<[](U a, U b) { return std::min(a, b); }>;
  table["max." + u] = lanes<[](U a, U b) { return std::max(a, b); }>;
  table["div." + s] = lanes<[](T a, T b) { return quotient<T>(a, b); }>;
  table["div." + u] = lanes<[](U a, U b) { return quotient<U>(a, b); }>;
  table["rem." + s] = lanes<[](T a, T b) { return remainder<T>(a, b); }>;
  table["rem." + u] = lanes<[](U a, U b) { return remainder<U>(a, b); }>;
}

// selp and setp have a predicate as their last operand or as their result.
template <typename T>
constexpr Entry choose = lanes<[](T a, T b, Predicate first) { return first.value ? a : b; }>;

// A comparison is false with a NaN; its unordered form, whose name ends in u, is true.
template <typename T, auto Wide, typename Compare>
void comparison(Table& table, const std::string& name, const std::string& type) {
  table["setp." + name + "." + type] = lanes<[](T a, T b) {
    const auto x = Wide(a), y = Wide(b);
    return Predicate{x == x && y == y && Compare()(x, y)};
  }>;
  if constexpr (std::is_floating_point_v<decltype(Wide(T{}))> || std::is_same_v<T, _Float16>)
    table["setp." + name + "u." + type] = lanes<[](T a, T b) {
      const auto x = Wide(a), y = Wide(b);
      return Predicate{x != x || y != y || Compare()(x, y)};
    }>;
}
template <typename T, auto Wide>
void comparisons(Table& table, const std::string& type) {
  comparison<T, Wide, std::equal_to<>>(table, "eq", type);
  comparison<T, Wide, std::not_equal_to<>>(table, "ne", type);
  comparison<T, Wide, std::less<>>(table, "lt", type);
  comparison<T, Wide, std::less_equal<>>(table, "le", type);
  comparison<T, Wide, std::greater<>>(table, "gt", type);
  comparison<T, Wide, std::greater_equal<>>(table, "ge", type);
  if constexpr (std::is_unsigned_v<T>) {
    comparison<T, Wide, std::less<>>(table, "lo", type);
    comparison<T, Wide, std::less_equal<>>(table, "ls", type);
    comparison<T, Wide, std::greater<>>(table, "hi", type);
    comparison<T, Wide, std::greater_equal<>>(table, "hs", type);
  }
  table["setp.nan." + type] =
      lanes<[](T a, T b) { return Predicate{Wide(a) != Wide(a) || Wide(b) != Wide(b)}; }>;
  table["setp.num." + type] =
      lanes<[](T a, T b) { return Predicate{Wide(a) == Wide(a) && Wide(b) == Wide(b)}; }>;
}
// True for a NaN.
template <typename T>
void unordered_comparisons(Table& table, const std::string& type) {
  table["setp.equ." + type] = lanes<[](T a, T b) { return Predicate{!(a < b || a > b)}; }>;
  table["setp.ltu." + type] = lanes<[](T a, T b) { return Predicate{!(a >= b)}; }>;
  table["setp.leu." + type] = lanes<[](T a, T b) { return Predicate{!(a > b)}; }>;
  table["setp.gtu." + type] = lanes<[](T a, T b) { return Predicate{!(a <= b)}; }>;
  table["setp.geu." + type] = lanes<[](T a, T b) { return Predicate{!(a < b)}; }>;
}
// setp of two halves: %p|%q.
template <typename T, auto Compare>
void compare_halves(Block& block, Warp& warp, const Instruction& instruction, uint32_t lanes) {
  const auto& operands = instruction.operands;
  for (int lane = 0; lane < kLanes; ++lane) {
    if (!(lanes >> lane & 1)) continue;
    const u64 a = block.value(warp, operands[1], lane), b = block.value(warp, operands[2], lane);
    block.set(warp, operands[0], lane, Compare(from<T>(a), from<T>(b)));
    warp.registers[operands[0].second][lane] = Compare(from<T>(a >> 16), from<T>(b >> 16));
  }
}
template <typename T>
void packed_comparisons(Table& table, const std::string& type) {
  table["setp.eq." + type] = compare_halves<T, [](T a, T b) { return number(a) == number(b); }>;
  table["setp.lt." + type] =
      compare_halves<T, [](T a, T b) { return std::less()(number(a), number(b)); }>;
  table["setp.gt." + type] =
      compare_halves<T, [](T a, T b) { return std::less()(number(b), number(a)); }>;
}
constexpr auto same = [](auto x) { return x; };
constexpr auto widened = [](Bf16 x) { return wide(x); };

// Arithmetic of bf16 or f16, alone and in pairs, by float32, whose sums and products are rounded as
// the exact ones.
template <typename T, auto Narrow>
void half_precision(Table& table, const std::string& type) {
  struct Pair {
    T low, high;
  };
  table["add." + type] = lanes<[](T a, T b) { return Narrow(number(a) + number(b)); }>;
  table["sub." + type] = lanes<[](T a, T b) { return Narrow(number(a) - number(b)); }>;
  table["mul." + type] = lanes<[](T a, T b) { return Narrow(number(a) * number(b)); }>;
  table["mul.rn." + type] = table["mul." + type];
  table["min." + type] = lanes<[](T a, T b) { return Narrow(smaller(number(a), number(b))); }>;
  table["max." + type] = lanes<[](T a, T b) { return Narrow(larger(number(a), number(b))); }>;
  table["add.rn.f32." + type] = lanes<[](T a, float b) { return number(a) + b; }>;
  table["sub.rn.f32." + type] = lanes<[](T a, float b) { return number(a) - b; }>;
  table["fma.rn.f32." + type] =
      lanes<[](T a, T b, float c) { return std::fma(number(a), number(b), c); }>;
  table["add." + type + "x2"] = lanes<[](Pair a, Pair b) {
    return Pair{Narrow(number(a.low) + number(b.low)), Narrow(number(a.high) + number(b.high))};
  }>;
  table["mul." + type + "x2"] = lanes<[](Pair a, Pair b) {
    return Pair{Narrow(number(a.low) * number(b.low)), Narrow(number(a.high) * number(b.high))};
  }>;
}

void floats(Table& table) {
  table["add.f32"] = table["add.rn.f32"] = lanes<[](float a, float b) { return a + b; }>;
  table["sub.f32"] = table["sub.rn.f32"] = lanes<[](float a, float b) { return a - b; }>;
  table["mul.f32"] = table["mul.rn.f32"] = lanes<[](float a, float b) { return a * b; }>;
  table["fma.rn.f32"] = lanes<[](float a, float b, float c) { return std::fma(a, b, c); }>;
  table["fma.rn.ftz.f32"] = lanes<[](float a, float b, float c) {
    return flushed(std::fma(flushed(a), flushed(b), flushed(c)));
  }>;
  table["fma.rm.f32"] = lanes<fused_down>;
  table["neg.f32"] = lanes<[](float a) { return -a; }>;
  table["abs.f32"] = lanes<[](float a) { return std::fabs(a); }>;
  table["min.f32"] = lanes<[](float a, float b) { return smaller(a, b); }>;
  table["max.f32"] = lanes<[](float a, float b) { return larger(a, b); }>;
  table["min.f32/4"] = lanes<[](float a, float b, float c) { return smaller(smaller(a, b), c); }>;
  table["max.f32/4"] = lanes<[](float a, float b, float c) { return larger(larger(a, b), c); }>;
  table["min.NaN.f32"] =
      lanes<[](float a, float b) { return std::isnan(a) || std::isnan(b) ? kNan : smaller(a, b); }>;
  table["max.NaN.f32"] =
      lanes<[](float a, float b) { return std::isnan(a) || std::isnan(b) ? kNan : larger(a, b); }>;
  table["div.full.f32"] = table["div.rn.f32"] = lanes<[](float a, float b) { return a / b; }>;
  table["div.approx.f32"] = lanes<rough_quotient>;
  table["rcp.rn.f32"] = lanes<[](float a) { return 1.0f / a; }>;
  table["ex2.approx.f32"] = lanes<[](float a) { return std::exp2(a); }>;
  table["ex2.approx.ftz.f32"] = lanes<[](float a) { return flushed(std::exp2(flushed(a))); }>;
  table["lg2.approx.f32"] = lanes<[](float a) { return std::log2(a); }>;
  table["rcp.approx.ftz.f32"] = lanes<[](float a) { return flushed(1.0f / flushed(a)); }>;
  table["sqrt.rn.f32"] = lanes<[](float a) { return std::sqrt(a); }>;
  table["sqrt.approx.ftz.f32"] = lanes<[](float a) { return flushed(std::sqrt(flushed(a))); }>;
  table["rsqrt.approx.ftz.f32"] = lanes<[](float a) { return 1.0f / std::sqrt(flushed(a)); }>;
  table["add.f64"] = table["add.rn.f64"] = lanes<[](double a, double b) { return a + b; }>;
  table["sub.f64"] = table["sub.rn.f64"] = lanes<[](double a, double b) { return a - b; }>;
  table["mul.f64"] = table["mul.rn.f64"] = lanes<[](double a, double b) { return a * b; }>;
  table["fma.rn.f64"] = lanes<[](double a, double b, double c) { return std::fma(a, b, c); }>;
  table["div.rn.f64"] = lanes<[](double a, double b) { return a / b; }>;
  table["rcp.rn.f64"] = lanes<[](double a) { return 1.0 / a; }>;
  table["rcp.approx.ftz.f64"] = lanes<rough_inverse>;
  table["sqrt.rn.f64"] = lanes<[](double a) { return std::sqrt(a); }>;
  table["neg.f64"] = lanes<[](double a) { return -a; }>;
  table["abs.f64"] = lanes<[](double a) { return std::fabs(a); }>;
  table["add.f32x2"] = table["add.rn.f32x2"] = lanes<pairs<plus>>;
  table["sub.f32x2"] = table["sub.rn.f32x2"] = lanes<pairs<minus>>;
  table["mul.f32x2"] = table["mul.rn.f32x2"] = lanes<pairs<times>>;
  table["fma.rn.f32x2"] = lanes<[](F32x2 a, F32x2 b, F32x2 c) {
    return F32x2{std::fma(a.low, b.low, c.low), std::fma(a.high, b.high, c.high)};
  }>;
  table["fma.rn.bf16x2"] = lanes<[](Bf16x2 a, Bf16x2 b, Bf16x2 c) {
    return Bf16x2{fused({a.low}, {b.low}, {c.low}).bits, fused({a.high}, {b.high}, {c.high}).bits};
  }>;
  table["fma.rn.bf16"] = lanes<[](Bf16 a, Bf16 b, Bf16 c) { return fused(a, b, c); }>;
  table["abs.bf16"] = table["abs.f16"] = lanes<[](u16 a) { return u16(a & 0x7fff); }>;
  table["neg.bf16"] = table["neg.f16"] = lanes<[](u16 a) { return u16(a ^ 0x8000); }>;
  half_precision<Bf16, narrow>(table, "bf16");
  half_precision<_Float16, half>(table, "f16");
  comparisons<float, same>(table, "f32");
  unordered_comparisons<float>(table, "f32");
  unordered_comparisons<double>(table, "f64");
  comparisons<double, same>(table, "f64");
  comparisons<Bf16, widened>(table, "bf16");
  comparisons<_Float16, same>(table, "f16");
  packed_comparisons<Bf16>(table, "bf16x2");
  packed_comparisons<_Float16>(table, "f16x2");
}

void conversions(Table& table) {
  table["cvt.f32.bf16"] = lanes<[](Bf16 a) { return wide(a); }>;
  table["cvt.f64.bf16"] = lanes<[](Bf16 a) { return double(wide(a)); }>;
  table["cvt.rn.bf16.f32"] = lanes<[](float a) { return narrow(a); }>;
  table["cvt.rn.bf16x2.f32"] =
      lanes<[](float high, float low) { return Bf16x2{narrow(low).bits, narrow(high).bits}; }>;
  table["cvt.f32.f16"] = lanes<[](_Float16 a) { return float(a); }>;
  table["cvt.rn.f16.f32"] = lanes<[](float a) { return half(a); }>;
  table["cvt.rn.f16x2.f32"] =
      lanes<[](float high, float low) { return u32(bits(half(high)) << 16 | bits(half(low))); }>;
  table["cvt.rn.f32.f64"] = lanes<[](double a) { return float(a); }>;
  table["cvt.f64.f32"] = lanes<[](float a) { return double(a); }>;
  table["cvt.rn.f64.s32"] = lanes<[](s32 a) { return double(a); }>;
  table["cvt.rn.f64.s64"] = lanes<[](s64 a) { return double(a); }>;
  // Saturation makes 0 of a NaN.
  table["cvt.sat.f32.f32"] = lanes<[](float a) { return std::fmin(std::fmax(a, 0.0f), 1.0f); }>;
  table["cvt.rn.f32.s32"] = lanes<[](s32 a) { return float(a); }>;
  table["cvt.rn.f32.u32"] = lanes<[](u32 a) { return float(a); }>;
  table["cvt.rn.f32.u16"] = lanes<[](u16 a) { return float(a); }>;
  table["cvt.rzi.s32.f32"] = lanes<[](float a) { return rounded_to_zero<s32>(a); }>;
  table["cvt.rzi.s64.f64"] = lanes<[](double a) { return rounded_to_zero<s64>(a); }>;
  table["cvt.s16.s8"] = lanes<[](int8_t a) { return s16(a); }>;
  table["cvt.s32.s8"] = lanes<[](int8_t a) { return s32(a); }>;
  table["cvt.s32.s16"] = lanes<[](s16 a) { return s32(a); }>;
  table["cvt.u16.u64"] = lanes<[](u64 a) { return u16(a); }>;
  table["cvt.u64.u16"] = lanes<[](u16 a) { return u64(a); }>;
  table["cvt.rn.f32.s16"] = lanes<[](s16 a) { return float(a); }>;
  table["cvt.rn.f32.s64"] = lanes<[](s64 a) { return float(a); }>;
  table["cvt.rn.f32.u64"] = lanes<[](u64 a) { return float(a); }>;
  table["cvt.s64.s32"] = lanes<[](s32 a) { return s64(a); }>;
  table["cvt.u64.u32"] = lanes<[](u32 a) { return u64(a); }>;
  table["cvt.u32.u64"] = lanes<[](u64 a) { return u32(a); }>;
  table["cvt.u16.u32"] = lanes<[](u32 a) { return u16(a); }>;
  table["cvt.u32.u16"] = lanes<[](u16 a) { return u32(a); }>;
}

}  // namespace

void add_arithmetic(Table& table) {
  integers<s16>(table, "s16", "u16", "b16");
  integers<s32>(table, "s32", "u32", "b32");
  integers<s64>(table, "s64", "u64", "b64");
  table["mul.wide.u16"] = lanes<[](u16 a, u16 b) { return u32(a) * b; }>;
  table["mul.wide.s32"] = lanes<[](s32 a, s32 b) { return s64(a) * b; }>;
  table["mul.wide.u32"] = lanes<[](u32 a, u32 b) { return u64(a) * b; }>;
  table["mad.wide.s32"] = lanes<[](s32 a, s32 b, s64 c) { return s64(u64(s64(a) * b) + u64(c)); }>;
  table["mad.wide.u32"] = lanes<[](u32 a, u32 b, u64 c) { return u64(a) * b + c; }>;
  table["mul.hi.u32"] = lanes<[](u32 a, u32 b) { return u32(u64(a) * b >> 32); }>;
  table["mul.hi.s32"] = lanes<[](s32 a, s32 b) { return s32(s64(a) * b >> 32); }>;
  table["mul.hi.u64"] = lanes<[](u64 a, u64 b) { return u64((unsigned __int128)(a)*b >> 64); }>;
  table["mul.wide.s16"] = lanes<[](s16 a, s16 b) { return s32(a) * b; }>;
  table["popc.b32"] = lanes<[](u32 a) { return u32(std::popcount(a)); }>;
  table["clz.b32"] = lanes<[](u32 a) { return u32(std::countl_zero(a)); }>;
  table["bfe.s32"] = lanes<[](s32 a, u32 b, u32 c) { return bit_field<s32>(a, b, c); }>;
  table["bfe.u32"] = lanes<[](u32 a, u32 b, u32 c) { return bit_field<u32>(a, b, c); }>;
  table["prmt.b32"] = lanes<[](u32 a, u32 b, u32 c) { return permuted(a, b, c); }>;
  table["shf.l.wrap.b32"] = lanes<funnel_shifted>;
  const auto predicates = [&](const char* name, Entry entry) { table[name] = entry; };
  predicates("and.pred",
             lanes<[](Predicate a, Predicate b) { return Predicate{a.value && b.value}; }>);
  predicates("or.pred",
             lanes<[](Predicate a, Predicate b) { return Predicate{a.value || b.value}; }>);
  predicates("xor.pred",
             lanes<[](Predicate a, Predicate b) { return Predicate{a.value != b.value}; }>);
  predicates("not.pred", lanes<[](Predicate a) { return Predicate{!a.value}; }>);
  for (const char* type : {"b16", "s16", "u16"}) table[std::string("selp.") + type] = choose<u16>;
  for (const char* type : {"b32", "s32", "u32", "f32"})
    table[std::string("selp.") + type] = choose<u32>;
  for (const char* type : {"b64", "s64", "u64", "f64"})
    table[std::string("selp.") + type] = choose<u64>;
  comparisons<s16, same>(table, "s16");
  comparisons<u16, same>(table, "u16");
  comparisons<u16, same>(table, "b16");
  comparisons<s32, same>(table, "s32");
  comparisons<u32, same>(table, "u32");
  comparisons<u32, same>(table, "b32");
  comparisons<s64, same>(table, "s64");
  comparisons<u64, same>(table, "u64");
  comparisons<u64, same>(table, "b64");
  floats(table);
  conversions(table);
}

}  // namespace ptx
