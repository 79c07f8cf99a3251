// Bindings of attention, attention_varlen and attention_decode on the CPU. Arguments were checked
// by fusedops/ops; what a kernel would read out of bounds for is checked here again, since compiled
// code does not pass there.
#include "attention.h"

#include <cmath>
#include <limits>
#include <vector>

#include <ATen/ExpandUtils.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_backward_cpu_dispatch.h>
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu_cpu_dispatch.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/isneginf.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <torch/library.h>

#include "../../common/binding.h"
#include "../common/torch_kernels.h"

namespace fusedops {
namespace {

using Optional = std::optional<at::Tensor>;

// The tensor with its last dim contiguous: what the kernels take, whatever the other strides.
at::Tensor with_dense_heads(const at::Tensor& tensor) {
  return tensor.stride(-1) == 1 || tensor.size(-1) <= 1 ? tensor : tensor.contiguous();
}

// An empty tensor [batch, heads, tokens, size] that lies in memory as [batch, tokens, heads, size].
at::Tensor heads_inside(int64_t batch, int64_t heads, int64_t tokens, int64_t size,
                        const at::TensorOptions& options) {
  return at::empty({batch, tokens, heads, size}, options).transpose(1, 2);
}

const void* element(const at::Tensor& tensor, int64_t dim, int64_t index) {
  return static_cast<const char*>(tensor.const_data_ptr()) +
         index * tensor.stride(dim) * tensor.element_size();
}

void* mutable_element(const at::Tensor& tensor, int64_t dim, int64_t index) {
  return tensor.defined() ? const_cast<void*>(element(tensor, dim, index)) : nullptr;
}

// Head and token strides; the dims are (heads, tokens) or, packed, (tokens, heads).
HeadsOf heads_of(const at::Tensor& tensor, int64_t head_dim, int64_t token_dim) {
  return tensor.defined() ? HeadsOf{tensor.stride(head_dim), tensor.stride(token_dim)}
                          : HeadsOf{0, 0};
}

int64_t broadcast_stride(const at::Tensor& tensor, int64_t dim) {
  return tensor.size(dim) == 1 ? 0 : tensor.stride(dim);
}

// Whether what the output's rounding took is kept for the backward.
bool keeps(const at::Tensor& query, bool keep_remainder) {
  return keep_remainder && is_half(dtype_of(query));
}

// Whether the log-sum-exp is kept in two parts as well.
bool keeps_parts(const at::Tensor& query, const Optional& mask, bool keep_remainder) {
  const bool wide = query.scalar_type() == statistics_type(query);
  const bool additive = mask.has_value() && mask->defined() && mask->scalar_type() != at::kBool;
  return keep_remainder && (wide || additive);
}

struct Options {
  double scale, softcap;
  int64_t window_left, window_right;
};

// What all calls fill alike.
AttentionCall call_of(const at::Tensor& query, int64_t heads, int64_t key_heads, int64_t size,
                      int64_t value_size, const at::Tensor& sinks, const Options& options) {
  AttentionCall call{};
  call.heads = heads;
  call.key_heads = key_heads;
  call.size = size;
  call.value_size = value_size;
  call.mask_kind = MaskKind::none;
  call.sinks = data(sinks);
  call.scale = options.scale;
  call.softcap = options.softcap;
  call.window_left = options.window_left;
  call.window_right = options.window_right;
  call.dtype = dtype_of(query);
  return call;
}

const void* slopes_of(const at::Tensor& slopes, int64_t sequence) {
  if (!slopes.defined()) return nullptr;
  return slopes.dim() == 2 ? element(slopes, 0, sequence) : slopes.const_data_ptr();
}

// One query a sequence, the step of generation, would leave most lanes of a matrix product empty.
// The choice must not depend on what else is in a batch: each op makes it by its own shape.
void run_forward(const AttentionCall& call, bool few_queries) {
  if (few_queries && !call.dropout.active()) {
    FUSEDOPS_CALL_ISA(attention_few_queries, call);
  } else {
    FUSEDOPS_CALL_ISA(attention_forward, call);
  }
}

constexpr int64_t kFewQueries = 4;

// ---- attention ----

struct Inputs {
  at::Tensor query, key, value, mask, slopes, sinks;

  Inputs(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
         const Optional& mask, const Optional& slopes, const Optional& sinks)
      : query(with_dense_heads(query)),
        key(with_dense_heads(key)),
        value(with_dense_heads(value)),
        mask(mask.value_or(at::Tensor())),
        slopes(dense(slopes)),
        sinks(dense(sinks)) {}
};

void set_mask(AttentionCall& call, const at::Tensor& mask, const at::Tensor& query) {
  if (!mask.defined()) return;
  call.mask_kind = mask.scalar_type() == at::kBool             ? MaskKind::boolean
                   : mask.scalar_type() == query.scalar_type() ? MaskKind::data
                                                               : MaskKind::wide;
  call.mask_head_stride = broadcast_stride(mask, 1);
  call.mask_row_stride = broadcast_stride(mask, 2);
  call.mask_column_stride = broadcast_stride(mask, 3);
}

// Dropout of scores. Its seed may say where they stand in larger ones: fusedops/_core/philox.py.
struct ScoreDropout {
  at::Tensor seed;
  Dropout dropout;

  ScoreDropout() = default;
  ScoreDropout(const Optional& given, double p)
      : seed(dense(given)), dropout(dropout_of(seed, p)) {}

  // {base, batch_stride, head_stride, rows..., columns...}, or null.
  const int64_t* numbers() const {
    return seed.defined() && seed.numel() > 2 ? seed.const_data_ptr<int64_t>() + 2 : nullptr;
  }
  // Where rows stand, then columns: `tokens` of both together; null where they follow each other.
  const int64_t* tables(int64_t tokens) const {
    if (numbers() == nullptr || seed.numel() == 5) return nullptr;
    TORCH_CHECK_VALUE(seed.numel() == 5 + tokens,
                      "attention: the seed must have a place for each row and column, ", tokens,
                      ", got ", seed.numel() - 5);
    return numbers() + 3;
  }
};

// The call on dense batches; outputs and gradients are added by the caller.
AttentionCall dense_call(const Inputs& in, std::vector<AttentionSequence>& sequences,
                         const at::Tensor& lse, const ScoreDropout& drop, const Options& options) {
  const int64_t batch = in.query.size(0), heads = in.query.size(1), rows = in.query.size(2);
  const int64_t columns = in.key.size(2);
  auto call = call_of(in.query, heads, in.key.size(1), in.query.size(3), in.value.size(3), in.sinks,
                      options);
  call.query = heads_of(in.query, 1, 2);
  call.key = heads_of(in.key, 1, 2);
  call.value = heads_of(in.value, 1, 2);
  call.lse_head_stride = rows;
  call.dropout = drop.dropout;
  const int64_t* place = drop.numbers();
  const int64_t* tables = drop.tables(rows + columns);
  const int64_t batch_stride = place != nullptr ? place[1] : heads * rows * columns;
  call.dropout_head_stride = place != nullptr ? place[2] : rows * columns;
  call.dropout_row_stride = columns;
  set_mask(call, in.mask, in.query);
  for (int64_t b = 0; b < batch; ++b) {
    AttentionSequence sequence{};
    sequence.query = element(in.query, 0, b);
    sequence.key = element(in.key, 0, b);
    sequence.value = element(in.value, 0, b);
    if (in.mask.defined()) sequence.mask = element(in.mask, 0, in.mask.size(0) == 1 ? 0 : b);
    sequence.slopes = slopes_of(in.slopes, b);
    sequence.lse = mutable_element(lse, 0, b);
    sequence.rows = rows;
    sequence.columns = columns;
    sequence.dropout_first = (place != nullptr ? place[0] : 0) + b * batch_stride;
    sequence.dropout_rows = tables;
    sequence.dropout_columns = tables != nullptr ? tables + rows : nullptr;
    sequences.push_back(sequence);
  }
  call.sequences = sequences.data();
  call.sequence_count = batch;
  return call;
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> forward(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
    const Optional& attn_mask, const Optional& alibi_slopes, const Optional& sinks,
    const Optional& seed, double dropout_p, double scale, int64_t window_left, int64_t window_right,
    double softcap, bool keep_remainder) {
  const Inputs in(query, key, value, attn_mask, alibi_slopes, sinks);
  const int64_t batch = query.size(0), heads = query.size(1), rows = query.size(2);
  auto output = heads_inside(batch, heads, rows, value.size(3), query.options());
  auto lse = at::empty({batch, heads, rows}, query.options().dtype(statistics_type(query)));
  auto remainder = keeps(query, keep_remainder)
                       ? heads_inside(batch, heads, rows, value.size(3), query.options())
                       : at::empty({0}, query.options());
  auto parts = keeps_parts(query, attn_mask, keep_remainder)
                   ? at::empty({batch, heads, rows, 2}, lse.options())
                   : at::empty({0}, lse.options());
  if (lse.numel() == 0) return {output, lse, remainder, parts};
  std::vector<AttentionSequence> sequences;
  const ScoreDropout drop(seed, dropout_p);
  auto call = dense_call(in, sequences, lse, drop, {scale, softcap, window_left, window_right});
  call.output = heads_of(output, 1, 2);
  for (int64_t b = 0; b < batch; ++b) {
    sequences[b].output = mutable_element(output, 0, b);
    if (remainder.dim() == 4) sequences[b].remainder = mutable_element(remainder, 0, b);
    if (parts.dim() == 4) sequences[b].lse_parts = mutable_element(parts, 0, b);
  }
  run_forward(call, rows == 1);
  return {output, lse, remainder, parts};
}

at::Tensor as_laid_out(const at::Tensor& tensor, const at::Tensor& like) {
  if (tensor.strides() == like.strides()) return tensor;
  return at::empty_strided(like.sizes(), like.strides(), like.options()).copy_(tensor);
}

// The gradients of output rows, what they share, and what the kernels still need of them.
struct Incoming {
  at::Tensor grad;   // of the output, of its dtype
  at::Tensor delta;  // [heads, rows] or [batch, heads, rows]
  bool has_lse;      // whether the log-sum-exp has a gradient
};

// grad_lse and lse have the dims (batch,) heads, rows; output and its gradient those and a size.
Incoming incoming(const Optional& grad_output, const Optional& grad_lse, const at::Tensor& output,
                  const at::Tensor& remainder, const at::Tensor& lse) {
  const auto given = grad_output.has_value() && grad_output->defined()
                         ? grad_output->to(output.scalar_type())
                         : at::zeros_like(output);
  const auto by_output = with_dense_heads(output);
  const auto from_lse = gradient(grad_lse, lse);
  Incoming in{with_dense_heads(given), at::empty(lse.sizes(), lse.options()), from_lse.defined()};
  AttentionDelta arguments{};
  arguments.output = data(by_output);
  at::Tensor rest;
  if (remainder.numel() > 0) rest = as_laid_out(remainder, by_output);
  arguments.remainder = data(rest);
  arguments.grad_output = data(in.grad);
  arguments.grad_lse = data(from_lse);
  arguments.delta = mutable_data(in.delta);
  const int64_t extra = output.dim() - 3;  // packed: no batch, and tokens before heads
  arguments.batch = extra ? output.size(0) : 1;
  arguments.heads = lse.size(extra);
  arguments.rows = lse.size(extra + 1);
  arguments.size = output.size(-1);
  const auto fill = [&](int64_t (&strides)[3], const at::Tensor& tensor) {
    strides[0] = extra ? tensor.stride(0) : 0;
    strides[1] = tensor.stride(1);
    strides[2] = tensor.stride(extra ? 2 : 0);
  };
  fill(arguments.output_strides, by_output);
  fill(arguments.grad_strides, in.grad);
  arguments.dtype = dtype_of(output);
  FUSEDOPS_CALL_ISA(attention_delta, arguments);
  return in;
}

// The gradient of the sinks: -sum over rows of exp(sink - lse) * delta. [(batch,) heads, rows].
at::Tensor sinks_gradient(const at::Tensor& sinks, const at::Tensor& lse, const at::Tensor& delta) {
  auto grad = at::zeros(sinks.sizes(), sinks.options());
  const auto dense_lse = lse.contiguous();
  const int64_t heads = sinks.size(0), rows = lse.size(-1), count = lse.numel();
  with_statistics(grad, [&]<typename A>(A* total) {
    const A *sink = sinks.const_data_ptr<A>(), *origin = dense_lse.const_data_ptr<A>();
    for (int64_t i = 0; i < count; ++i) {
      if (origin[i] == -std::numeric_limits<A>::infinity()) continue;  // nothing was attended
      const int64_t head = i / rows % heads;
      total[head] -= std::exp(sink[head] - origin[i]) * delta.const_data_ptr<A>()[i];
    }
  });
  return grad;
}

using Gradients = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

Gradients backward(const Optional& grad_output, const Optional& grad_lse, const at::Tensor& query,
                   const at::Tensor& key, const at::Tensor& value, const Optional& attn_mask,
                   const Optional& alibi_slopes, const Optional& sinks, const Optional& seed,
                   const at::Tensor& output, const at::Tensor& lse, const at::Tensor& remainder,
                   const at::Tensor& lse_parts, double dropout_p, double scale, int64_t window_left,
                   int64_t window_right, double softcap, bool, c10::List<bool> output_mask) {
  const Inputs in(query, key, value, attn_mask, alibi_slopes, sinks);
  const int64_t batch = query.size(0), heads = query.size(1), rows = query.size(2);
  const int64_t columns = key.size(2);
  at::Tensor dq, dk, dv, dmask, dsinks, ds;
  const auto like = [&](const at::Tensor& tensor) {
    return heads_inside(batch, tensor.size(1), tensor.size(2), tensor.size(3), tensor.options());
  };
  if (output_mask[0]) dq = like(query);
  if (output_mask[1]) dk = like(key);
  if (output_mask[2]) dv = like(value);
  if (output_mask[3]) {
    ds = at::zeros({batch, heads, rows, columns}, query.options().dtype(statistics_type(query)));
  }
  const auto dense_lse = lse.contiguous(), parts = lse_parts.contiguous();
  const auto from = incoming(grad_output, grad_lse, output, remainder, dense_lse);
  std::vector<AttentionSequence> sequences;
  const ScoreDropout drop(seed, dropout_p);
  auto call =
      dense_call(in, sequences, dense_lse, drop, {scale, softcap, window_left, window_right});
  call.output = heads_of(from.grad, 1, 2);
  call.lse_has_gradient = from.has_lse;
  call.grad_query = heads_of(dq, 1, 2);
  call.grad_key = heads_of(dk, 1, 2);
  call.grad_value = heads_of(dv, 1, 2);
  for (int64_t b = 0; b < batch; ++b) {
    auto& sequence = sequences[b];
    // Read only: the field is the output of the forward.
    sequence.output = const_cast<void*>(element(from.grad, 0, b));
    sequence.delta = element(from.delta, 0, b);
    if (parts.dim() == 4) sequence.lse_parts = const_cast<void*>(element(parts, 0, b));
    sequence.grad_query = mutable_element(dq, 0, b);
    sequence.grad_key = mutable_element(dk, 0, b);
    sequence.grad_value = mutable_element(dv, 0, b);
    sequence.grad_scores = mutable_element(ds, 0, b);
  }
  if (batch > 0 && (dq.defined() || dk.defined() || dv.defined() || ds.defined())) {
    FUSEDOPS_CALL_ISA(attention_backward, call);
  }
  if (ds.defined()) dmask = at::sum_to(ds, in.mask.sizes()).to(in.mask.scalar_type()).contiguous();
  if (output_mask[4]) dsinks = sinks_gradient(in.sinks, dense_lse, from.delta);
  return {dq, dk, dv, dmask, dsinks};
}

// ---- attention_varlen ----

struct Packed {
  at::Tensor query, key, value, slopes, sinks;
  std::vector<AttentionSequence> sequences = {};
  AttentionCall call = {};
};

Packed packed_call(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
                   const at::Tensor& cu_seqlens_q, const at::Tensor& cu_seqlens_k,
                   const Optional& alibi_slopes, const Optional& sinks, const at::Tensor& lse,
                   const ScoreDropout& drop, int64_t max_seqlen_k, const Options& options) {
  Packed p{with_dense_heads(query), with_dense_heads(key), with_dense_heads(value),
           dense(alibi_slopes), dense(sinks)};
  const auto q_ends = cu_seqlens_q.contiguous(), k_ends = cu_seqlens_k.contiguous();
  const int64_t* q = q_ends.const_data_ptr<int64_t>();
  const int64_t* k = k_ends.const_data_ptr<int64_t>();
  const int64_t count = q_ends.numel() - 1, tokens = query.size(0);
  p.call =
      call_of(query, query.size(1), key.size(1), query.size(2), value.size(2), p.sinks, options);
  p.call.query = heads_of(p.query, 1, 0);
  p.call.key = heads_of(p.key, 1, 0);
  p.call.value = heads_of(p.value, 1, 0);
  p.call.lse_head_stride = tokens;
  p.call.dropout = drop.dropout;
  const int64_t* place = drop.numbers();
  const int64_t* tables = drop.tables(tokens + key.size(0));
  TORCH_CHECK_VALUE(place == nullptr || tables != nullptr,
                    "attention_varlen: a seed with a place must have one for each token");
  p.call.dropout_head_stride = place != nullptr ? place[2] : tokens * max_seqlen_k;
  p.call.dropout_row_stride = max_seqlen_k;
  TORCH_CHECK_VALUE(q[0] == 0 && q[count] == tokens && k[0] == 0 && k[count] == key.size(0),
                    "attention_varlen: cu_seqlens must go from 0 to the number of tokens");
  for (int64_t i = 0; i < count; ++i) {
    AttentionSequence sequence{};
    sequence.rows = q[i + 1] - q[i];
    sequence.columns = k[i + 1] - k[i];
    TORCH_CHECK_VALUE(sequence.rows >= 0 && sequence.columns >= 0,
                      "attention_varlen: cu_seqlens must be monotone");
    sequence.query = element(p.query, 0, q[i]);
    sequence.key = element(p.key, 0, k[i]);
    sequence.value = element(p.value, 0, k[i]);
    sequence.slopes = slopes_of(p.slopes, i);
    sequence.lse = mutable_element(lse, 1, q[i]);
    sequence.offset = sequence.columns - sequence.rows;
    sequence.dropout_first = place != nullptr ? place[0] : q[i] * max_seqlen_k;
    sequence.dropout_rows = tables != nullptr ? tables + q[i] : nullptr;
    sequence.dropout_columns = tables != nullptr ? tables + tokens + k[i] : nullptr;
    p.sequences.push_back(sequence);
  }
  p.call.sequences = p.sequences.data();
  p.call.sequence_count = count;
  return p;
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> varlen_forward(
    const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
    const at::Tensor& cu_seqlens_q, const at::Tensor& cu_seqlens_k, const Optional& alibi_slopes,
    const Optional& sinks, const Optional& seed, int64_t, int64_t max_seqlen_k, double dropout_p,
    double scale, int64_t window_left, int64_t window_right, double softcap, bool keep_remainder) {
  const int64_t tokens = query.size(0), heads = query.size(1);
  auto output = at::empty({tokens, heads, value.size(2)}, query.options());
  auto lse = at::empty({heads, tokens}, query.options().dtype(statistics_type(query)));
  const ScoreDropout drop(seed, dropout_p);
  auto p = packed_call(query, key, value, cu_seqlens_q, cu_seqlens_k, alibi_slopes, sinks, lse,
                       drop, max_seqlen_k, {scale, softcap, window_left, window_right});
  auto remainder = keeps(query, keep_remainder) ? at::empty(output.sizes(), query.options())
                                                : at::empty({0}, query.options());
  if (lse.numel() == 0) return {output, lse, remainder};
  p.call.output = heads_of(output, 1, 0);
  int64_t token = 0;
  for (auto& sequence : p.sequences) {
    sequence.output = mutable_element(output, 0, token);
    if (remainder.dim() == 3) sequence.remainder = mutable_element(remainder, 0, token);
    token += sequence.rows;
  }
  run_forward(p.call, false);
  return {output, lse, remainder};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor> varlen_backward(
    const Optional& grad_output, const Optional& grad_lse, const at::Tensor& query,
    const at::Tensor& key, const at::Tensor& value, const at::Tensor& cu_seqlens_q,
    const at::Tensor& cu_seqlens_k, const Optional& alibi_slopes, const Optional& sinks,
    const Optional& seed, const at::Tensor& output, const at::Tensor& lse,
    const at::Tensor& remainder, int64_t, int64_t max_seqlen_k, double dropout_p, double scale,
    int64_t window_left, int64_t window_right, double softcap, bool, c10::List<bool> output_mask) {
  at::Tensor dq, dk, dv, dsinks;
  if (output_mask[0]) dq = at::empty(query.sizes(), query.options());
  if (output_mask[1]) dk = at::empty(key.sizes(), key.options());
  if (output_mask[2]) dv = at::empty(value.sizes(), value.options());
  const auto dense_lse = lse.contiguous();
  const auto from = incoming(grad_output, grad_lse, output, remainder, dense_lse);
  const ScoreDropout drop(seed, dropout_p);
  auto p = packed_call(query, key, value, cu_seqlens_q, cu_seqlens_k, alibi_slopes, sinks,
                       dense_lse, drop, max_seqlen_k, {scale, softcap, window_left, window_right});
  p.call.output = heads_of(from.grad, 1, 0);
  p.call.lse_has_gradient = from.has_lse;
  p.call.grad_query = heads_of(dq, 1, 0);
  p.call.grad_key = heads_of(dk, 1, 0);
  p.call.grad_value = heads_of(dv, 1, 0);
  int64_t token = 0, key_token = 0;
  for (auto& sequence : p.sequences) {
    sequence.output = const_cast<void*>(element(from.grad, 0, token));
    sequence.delta = element(from.delta, 1, token);
    sequence.grad_query = mutable_element(dq, 0, token);
    sequence.grad_key = mutable_element(dk, 0, key_token);
    sequence.grad_value = mutable_element(dv, 0, key_token);
    token += sequence.rows;
    key_token += sequence.columns;
  }
  if (dq.defined() || dk.defined() || dv.defined()) FUSEDOPS_CALL_ISA(attention_backward, p.call);
  if (output_mask[3]) dsinks = sinks_gradient(p.sinks, dense_lse, from.delta);
  return {dq, dk, dv, dsinks};
}

// ---- attention_decode ----

std::tuple<at::Tensor, at::Tensor> decode(const at::Tensor& query, const at::Tensor& key_cache,
                                          const at::Tensor& value_cache,
                                          const at::Tensor& cache_seqlens,
                                          const Optional& alibi_slopes, const Optional& sinks,
                                          double scale, int64_t window_left, double softcap) {
  const Inputs in(query, key_cache, value_cache, std::nullopt, alibi_slopes, sinks);
  const int64_t batch = query.size(0), heads = query.size(1), rows = query.size(2);
  auto output = heads_inside(batch, heads, rows, value_cache.size(3), query.options());
  auto lse = at::empty({batch, heads, rows}, query.options().dtype(statistics_type(query)));
  std::vector<AttentionSequence> sequences;
  auto call = dense_call(in, sequences, lse, ScoreDropout(), {scale, softcap, window_left, 0});
  call.output = heads_of(output, 1, 2);
  const auto lengths = cache_seqlens.contiguous();
  for (int64_t b = 0; b < batch; ++b) {
    const int64_t length = lengths.const_data_ptr<int64_t>()[b];
    TORCH_CHECK_VALUE(length >= 0 && length <= key_cache.size(2),
                      "attention_decode: cache_seqlens must be from 0 to ", key_cache.size(2),
                      ", the cache's capacity, got ", length);
    sequences[b].columns = length;
    sequences[b].offset = length - rows;
    sequences[b].output = mutable_element(output, 0, b);
  }
  if (lse.numel() > 0) run_forward(call, rows <= kFewQueries);
  return {output, lse};
}

// ---- scaled_dot_product_attention of torch: csrc/cpu/common/torch_kernels.h ----

bool has_mask(const Optional& mask) {
  return mask.has_value() && mask->defined();
}

bool is_mask(const at::Tensor& mask, const at::Tensor& query, const at::Tensor& key) {
  const int64_t rank = mask.dim();
  if (!is_replaced(mask) && mask.scalar_type() != at::kFloat) return false;
  if (mask.scalar_type() != query.scalar_type() && mask.scalar_type() != at::kFloat) return false;
  const int64_t sizes[] = {query.size(0), query.size(1), query.size(2), key.size(2)};
  for (int64_t dim = 0; dim < rank; ++dim) {
    if (mask.size(dim) != 1 && mask.size(dim) != sizes[4 - rank + dim]) return false;
  }
  return rank == 2 || rank == 4;
}

// Whether our kernels run a call: the tensors fit together.
bool is_ours(const at::Tensor& query, const at::Tensor& key, const at::Tensor& value,
             double dropout_p, const Optional& mask, std::optional<double> scale) {
  for (const auto* tensor : {&query, &key, &value}) {
    if (!is_replaced(*tensor) || tensor->scalar_type() != query.scalar_type() ||
        tensor->dim() != 4 || tensor->numel() == 0 || tensor->size(0) != query.size(0) ||
        tensor->size(1) != query.size(1) || tensor->size(3) != query.size(3)) {
      return false;
    }
  }
  return key.size(2) == value.size(2) && dropout_p == 0.0 && scale.value_or(1.0) > 0.0 &&
         (!has_mask(mask) || is_mask(*mask, query, key));
}

// The mask with four dimensions.
Optional as_four(const Optional& mask) {
  if (!has_mask(mask)) return std::nullopt;
  return mask->dim() == 4 ? *mask : mask->unsqueeze(0).unsqueeze(0);
}

double scale_of(const at::Tensor& query, std::optional<double> scale) {
  return scale.value_or(1.0 / std::sqrt(static_cast<double>(query.size(3))));
}

std::tuple<at::Tensor, at::Tensor> torch_forward(const at::Tensor& query, const at::Tensor& key,
                                                 const at::Tensor& value, double dropout_p,
                                                 bool is_causal, const Optional& attn_mask,
                                                 std::optional<double> scale) {
  if (!is_ours(query, key, value, dropout_p, attn_mask, scale)) {
    return at::cpu::_scaled_dot_product_flash_attention_for_cpu(query, key, value, dropout_p,
                                                                is_causal, attn_mask, scale);
  }
  count_call(TorchOperator::attention, query);
  const auto [output, lse, remainder, parts] =
      forward(query, key, value, as_four(attn_mask), {}, {}, {}, 0.0, scale_of(query, scale),
              /*window_left=*/-1, /*window_right=*/is_causal ? 0 : -1, /*softcap=*/0.0,
              /*keep_remainder=*/false);
  // torch's log-sum-exp lies as [batch, tokens, heads], and is 0 where a mask forbids all keys.
  if (has_mask(attn_mask)) lse.masked_fill_(lse.isneginf(), 0);
  auto logsumexp = at::empty({lse.size(0), lse.size(2), lse.size(1)}, lse.options());
  return {as_laid_out(output, at::empty_like(query)), logsumexp.transpose_(1, 2).copy_(lse)};
}

std::tuple<at::Tensor, at::Tensor, at::Tensor> torch_backward(
    const at::Tensor& grad_out, const at::Tensor& query, const at::Tensor& key,
    const at::Tensor& value, const at::Tensor& out, const at::Tensor& logsumexp, double dropout_p,
    bool is_causal, const Optional& attn_mask, std::optional<double> scale) {
  if (!is_ours(query, key, value, dropout_p, attn_mask, scale)) {
    return at::cpu::_scaled_dot_product_flash_attention_for_cpu_backward(
        grad_out, query, key, value, out, logsumexp, dropout_p, is_causal, attn_mask, scale);
  }
  count_call(TorchOperator::attention_backward, query);
  const auto nothing_kept = at::empty({0}, query.options());
  const auto [grad_query, grad_key, grad_value, grad_mask, grad_sinks] =
      backward(grad_out, {}, query, key, value, as_four(attn_mask), {}, {}, {}, out, logsumexp,
               nothing_kept, nothing_kept, 0.0, scale_of(query, scale), /*window_left=*/-1,
               /*window_right=*/is_causal ? 0 : -1, /*softcap=*/0.0, /*keep_remainder=*/false,
               c10::List<bool>({true, true, true, false, false}));
  return {grad_query, grad_key, grad_value};
}

}  // namespace

void replace_attention(torch::Library& library) {
  library.impl("_scaled_dot_product_flash_attention_for_cpu", TORCH_FN(torch_forward));
  library.impl("_scaled_dot_product_flash_attention_for_cpu_backward", TORCH_FN(torch_backward));
}

TORCH_LIBRARY_IMPL(fusedops_cpp, CPU, m) {
  m.impl("attention", forward);
  m.impl("attention_backward", backward);
  m.impl("attention_varlen", varlen_forward);
  m.impl("attention_varlen_backward", varlen_backward);
  m.impl("attention_decode", decode);
}

}  // namespace fusedops
