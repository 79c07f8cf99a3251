// The table of contents: one schema line per native kernel. Schemas are those of the fusedops::X
// ops (fusedops/ops/X.py) and of the X_backward ops that define_op derives from them.
//
// These operators are private and trust their caller: fusedops::X holds a call to the op's contract
// (contract.h) and then calls fusedops_cpp::X, where a second look would cost every call. Whoever
// calls torch.ops.fusedops_cpp.X with arguments that its contract refuses reads and writes memory
// that is not the tensors' own.
#include <torch/library.h>

TORCH_LIBRARY(fusedops_cpp, m) {
  m.def(
      "layer_norm(Tensor input, SymInt[] normalized_shape, Tensor? weight, Tensor? bias, float eps)"
      " -> (Tensor output, Tensor mean, Tensor rstd)");
  m.def(
      "layer_norm_backward(Tensor? grad_output, Tensor input, Tensor? weight, Tensor mean,"
      " Tensor rstd, SymInt[] normalized_shape, float eps, bool[] output_mask)"
      " -> (Tensor, Tensor, Tensor)");
  m.def(
      "rms_norm(Tensor input, SymInt[] normalized_shape, Tensor? weight, float eps,"
      " float weight_offset, str rounding) -> (Tensor output, Tensor rstd)");
  m.def(
      "rms_norm_backward(Tensor? grad_output, Tensor input, Tensor? weight, Tensor rstd,"
      " SymInt[] normalized_shape, float eps, float weight_offset, str rounding,"
      " bool[] output_mask) -> (Tensor, Tensor)");
  m.def("gelu(Tensor input, str approximate) -> (Tensor output)");
  m.def(
      "gelu_backward(Tensor? grad_output, Tensor input, str approximate, bool[] output_mask)"
      " -> Tensor");
  m.def("bias_gelu(Tensor input, Tensor bias, str approximate) -> (Tensor output)");
  m.def(
      "bias_gelu_backward(Tensor? grad_output, Tensor input, Tensor bias, str approximate,"
      " bool[] output_mask) -> (Tensor, Tensor)");
  m.def(
      "baddbmm(Tensor input, Tensor batch1, Tensor batch2, float beta, float alpha,"
      " int[] broadcast) -> (Tensor output)");
  m.def(
      "baddbmm_backward(Tensor? grad_output, Tensor batch1, Tensor batch2, float beta,"
      " float alpha, int[] broadcast, bool[] output_mask) -> (Tensor, Tensor, Tensor)");
  m.def(
      "linear_act(Tensor input, Tensor weight, Tensor? bias, str activation,"
      " bool keep_preactivation) -> (Tensor output, Tensor preactivation)");
  m.def(
      "linear_act_backward(Tensor? grad_output, Tensor input, Tensor weight, Tensor? bias,"
      " Tensor preactivation, str activation, bool keep_preactivation, bool[] output_mask)"
      " -> (Tensor, Tensor, Tensor)");
  m.def(
      "linear_glu(Tensor input, Tensor gate_weight, Tensor up_weight, str activation,"
      " bool keep_preactivations) -> (Tensor output, Tensor gate, Tensor up)");
  m.def(
      "linear_glu_backward(Tensor? grad_output, Tensor input, Tensor gate_weight,"
      " Tensor up_weight, Tensor gate, Tensor up, str activation, bool keep_preactivations,"
      " bool[] output_mask) -> (Tensor, Tensor, Tensor)");
  m.def(
      "grouped_mm(Tensor input, Tensor weight, Tensor offsets, Tensor? bias, str activation,"
      " bool keep_preactivation) -> (Tensor output, Tensor preactivation)");
  m.def(
      "grouped_mm_backward(Tensor? grad_output, Tensor input, Tensor weight, Tensor offsets,"
      " Tensor? bias, Tensor preactivation, str activation, bool keep_preactivation,"
      " bool[] output_mask) -> (Tensor, Tensor, Tensor)");
  m.def(
      "grouped_mm_add_gradients(Tensor(a!)? into_weight, Tensor(b!)? into_bias,"
      " Tensor grad_output, Tensor input, Tensor weight, Tensor offsets, Tensor? bias,"
      " Tensor preactivation, str activation, bool keep_preactivation, bool[] output_mask)"
      " -> (Tensor grad_input)");
  m.def(
      "moe_mlp(Tensor input, Tensor probs, Tensor permutation, Tensor positions, Tensor offsets,"
      " Tensor w1, Tensor w2, Tensor? b1, Tensor? b2, str activation, bool gated,"
      " bool interleaved, bool keep_preactivation) -> (Tensor output, Tensor preactivation)");
  m.def(
      "moe_mlp_backward(Tensor? grad_output, Tensor input, Tensor probs, Tensor permutation,"
      " Tensor positions, Tensor offsets, Tensor w1, Tensor w2, Tensor? b1, Tensor? b2,"
      " Tensor preactivation, str activation, bool gated, bool interleaved,"
      " bool keep_preactivation, bool[] output_mask)"
      " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "moe_mlp_add_gradients(Tensor(a!)? into_w1, Tensor(b!)? into_w2, Tensor(c!)? into_b1,"
      " Tensor(d!)? into_b2, Tensor grad_output, Tensor input, Tensor probs, Tensor permutation,"
      " Tensor positions, Tensor offsets, Tensor w1, Tensor w2, Tensor? b1, Tensor? b2,"
      " Tensor preactivation, str activation, bool gated, bool interleaved,"
      " bool keep_preactivation, bool[] output_mask) -> (Tensor grad_input, Tensor grad_probs)");
  m.def(
      "mlp(Tensor input, Tensor w1, Tensor? b1, Tensor w2, Tensor? b2, str activation,"
      " bool keep_preactivation) -> (Tensor output, Tensor preactivation)");
  m.def(
      "mlp_backward(Tensor? grad_output, Tensor input, Tensor w1, Tensor? b1, Tensor w2, Tensor? "
      "b2,"
      " Tensor preactivation, str activation, bool keep_preactivation, bool[] output_mask)"
      " -> (Tensor, Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "add_layer_norm(Tensor input, Tensor residual, SymInt[] normalized_shape, Tensor? weight,"
      " Tensor? bias, Tensor? seed, float eps, float dropout_p, ScalarType input_dtype)"
      " -> (Tensor normed, Tensor summed, Tensor mean, Tensor rstd)");
  m.def(
      "add_layer_norm_backward(Tensor? grad_normed, Tensor? grad_summed, Tensor summed,"
      " Tensor? weight, Tensor mean, Tensor rstd, Tensor? seed, SymInt[] normalized_shape,"
      " float eps, float dropout_p, ScalarType input_dtype, bool[] output_mask)"
      " -> (Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "add_rms_norm(Tensor input, Tensor residual, SymInt[] normalized_shape, Tensor? weight,"
      " Tensor? seed, float eps, float weight_offset, str rounding, float dropout_p,"
      " ScalarType input_dtype) -> (Tensor normed, Tensor summed, Tensor rstd)");
  m.def(
      "add_rms_norm_backward(Tensor? grad_normed, Tensor? grad_summed, Tensor summed,"
      " Tensor? weight, Tensor rstd, Tensor? seed, SymInt[] normalized_shape, float eps,"
      " float weight_offset, str rounding, float dropout_p, ScalarType input_dtype,"
      " bool[] output_mask) -> (Tensor, Tensor, Tensor)");
  m.def(
      "bias_dropout_add(Tensor input, Tensor? bias, Tensor residual, Tensor? seed, float p,"
      " ScalarType input_dtype) -> (Tensor output)");
  m.def(
      "bias_dropout_add_backward(Tensor? grad_output, Tensor? bias, Tensor? seed, float p,"
      " ScalarType input_dtype, bool[] output_mask) -> (Tensor, Tensor, Tensor)");
  m.def(
      "rotary_embedding(Tensor query, Tensor key, Tensor cos, Tensor sin, bool interleaved)"
      " -> (Tensor rotated_query, Tensor rotated_key)");
  m.def(
      "rotary_embedding_backward(Tensor? grad_rotated_query, Tensor? grad_rotated_key, Tensor cos,"
      " Tensor sin, bool interleaved, bool[] output_mask) -> (Tensor, Tensor)");
  m.def(
      "cross_entropy(Tensor logits, Tensor target, int ignore_index, float label_smoothing,"
      " float z_loss, float softcap, str reduction, ScalarType dtype)"
      " -> (Tensor loss, Tensor count, Tensor statistics)");
  m.def(
      "cross_entropy_backward(Tensor? grad_loss, Tensor logits, Tensor target, Tensor statistics,"
      " Tensor count, int ignore_index, float label_smoothing, float z_loss, float softcap,"
      " str reduction, ScalarType dtype, bool[] output_mask) -> Tensor");
  m.def(
      "linear_cross_entropy(Tensor hidden, Tensor weight, Tensor target, Tensor? bias,"
      " int ignore_index, float label_smoothing, float z_loss, float softcap, str reduction,"
      " int chunk_size, bool keep_logits, int all_classes)"
      " -> (Tensor loss, Tensor count, Tensor statistics, Tensor logits)");
  m.def(
      "linear_cross_entropy_backward(Tensor? grad_loss, Tensor hidden, Tensor weight,"
      " Tensor target, Tensor? bias, Tensor statistics, Tensor logits, int ignore_index,"
      " float label_smoothing, float z_loss, float softcap, str reduction, int chunk_size,"
      " bool keep_logits, int all_classes, bool[] output_mask) -> (Tensor, Tensor, Tensor)");
  m.def(
      "scaled_masked_softmax(Tensor input, Tensor? mask, float scale, bool is_causal)"
      " -> (Tensor output)");
  m.def(
      "scaled_masked_softmax_backward(Tensor? grad_output, Tensor? mask, Tensor output, float "
      "scale,"
      " bool is_causal, bool[] output_mask) -> (Tensor, Tensor)");
  m.def("swiglu(Tensor gate, Tensor up) -> (Tensor output)");
  m.def(
      "swiglu_backward(Tensor? grad_output, Tensor gate, Tensor up, bool[] output_mask)"
      " -> (Tensor, Tensor)");
  m.def("geglu(Tensor gate, Tensor up, str approximate) -> (Tensor output)");
  m.def(
      "geglu_backward(Tensor? grad_output, Tensor gate, Tensor up, str approximate,"
      " bool[] output_mask) -> (Tensor, Tensor)");
  m.def(
      "attention(Tensor query, Tensor key, Tensor value, Tensor? attn_mask, Tensor? alibi_slopes,"
      " Tensor? sinks, Tensor? seed, float dropout_p, float scale, SymInt window_left,"
      " SymInt window_right, float softcap, bool keep_remainder)"
      " -> (Tensor output, Tensor lse, Tensor remainder, Tensor lse_parts)");
  m.def(
      "attention_backward(Tensor? grad_output, Tensor? grad_lse, Tensor query, Tensor key,"
      " Tensor value, Tensor? attn_mask, Tensor? alibi_slopes, Tensor? sinks, Tensor? seed,"
      " Tensor output, Tensor lse, Tensor remainder, Tensor lse_parts, float dropout_p, float "
      "scale,"
      " SymInt window_left, SymInt window_right, float softcap, bool keep_remainder,"
      " bool[] output_mask)"
      " -> (Tensor, Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "attention_varlen(Tensor query, Tensor key, Tensor value, Tensor cu_seqlens_q,"
      " Tensor cu_seqlens_k, Tensor? alibi_slopes, Tensor? sinks, Tensor? seed,"
      " SymInt max_seqlen_q, SymInt max_seqlen_k, float dropout_p, float scale,"
      " SymInt window_left, SymInt window_right, float softcap, bool keep_remainder)"
      " -> (Tensor output, Tensor lse, Tensor remainder)");
  m.def(
      "attention_varlen_backward(Tensor? grad_output, Tensor? grad_lse, Tensor query, Tensor "
      "key,"
      " Tensor value, Tensor cu_seqlens_q, Tensor cu_seqlens_k, Tensor? alibi_slopes,"
      " Tensor? sinks, Tensor? seed, Tensor output, Tensor lse, Tensor remainder,"
      " SymInt max_seqlen_q, SymInt max_seqlen_k, float dropout_p, float scale,"
      " SymInt window_left, SymInt window_right, float softcap, bool keep_remainder,"
      " bool[] output_mask)"
      " -> (Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "attention_decode(Tensor query, Tensor key_cache, Tensor value_cache, Tensor "
      "cache_seqlens,"
      " Tensor? alibi_slopes, Tensor? sinks, float scale, SymInt window_left, float softcap)"
      " -> (Tensor output, Tensor lse)");
  m.def("moe_permute(Tensor input, Tensor positions, Tensor offsets) -> (Tensor output)");
  m.def(
      "moe_permute_backward(Tensor? grad_output, Tensor positions, Tensor offsets,"
      " bool[] output_mask) -> Tensor");
  m.def("moe_relayout(Tensor input, Tensor index, Tensor inverse) -> (Tensor output)");
  m.def(
      "moe_relayout_backward(Tensor? grad_output, Tensor index, Tensor inverse,"
      " bool[] output_mask) -> Tensor");
  m.def(
      "moe_unpermute(Tensor input, Tensor? probs, Tensor positions, Tensor offsets)"
      " -> (Tensor output)");
  m.def(
      "moe_unpermute_backward(Tensor? grad_output, Tensor? input, Tensor? probs,"
      " Tensor positions, Tensor offsets, bool[] output_mask) -> (Tensor, Tensor)");
  m.def(
      "moe_route(Tensor logits, Tensor? bias, Tensor? seed, Tensor? chosen, Tensor? chosen_kept,"
      " SymInt top_k, str score, bool normalize, float scaling, int num_groups, int topk_groups,"
      " str group_score, float jitter, SymInt capacity, str drop_policy)"
      " -> (Tensor probs, Tensor expert_ids, Tensor kept)");
  m.def(
      "moe_route_backward(Tensor? grad_probs, Tensor logits, Tensor? seed, Tensor expert_ids,"
      " Tensor kept, SymInt top_k, str score, bool normalize, float scaling, int num_groups,"
      " int topk_groups, str group_score, float jitter, SymInt capacity, str drop_policy,"
      " bool[] output_mask) -> Tensor");
  m.def(
      "moe_router_loss(Tensor logits, Tensor? weights, Tensor? z_weight, Tensor? mask, str score)"
      " -> (Tensor loss)");
  m.def(
      "moe_router_loss_backward(Tensor? grad_loss, Tensor logits, Tensor? weights,"
      " Tensor? z_weight, Tensor? mask, str score, bool[] output_mask) -> Tensor");
  m.def(
      "moe_sort(Tensor expert_ids, Tensor? kept, SymInt num_experts)"
      " -> (Tensor permutation, Tensor positions, Tensor tokens_per_expert, Tensor offsets)");
  m.def(
      "moe_pack(Tensor input, Tensor probs, Tensor? expert_ids, Tensor? index, Tensor? num_rows,"
      " SymInt span, bool quantized, SymInt[] layout) -> (Tensor payload)");
  m.def("moe_unpack(Tensor payload, Tensor like, SymInt[] layout) -> (Tensor rows)");
  m.def(
      "adamw(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] exp_avgs, Tensor(c!)[] exp_avg_sqs,"
      " Tensor(d!)[] max_exp_avg_sqs, Tensor(e!)[] copies, Tensor(f!)[] steps,"
      " Tensor? grad_factor, Tensor? found_inf, Tensor? learning_rate, int[] draws,"
      " float[] weight_decays, float lr, float beta1, float beta2, float eps, bool maximize,"
      " bool bias_correction) -> ()");
  m.def("square_sums(Tensor[] inputs) -> (Tensor sums)");
}
