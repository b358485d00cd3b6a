// SPDX-License-Identifier: MIT
// Rotary position embedding for op::Rope, which rotates the pairs (i, i + D/2) of a head by a table. Partial
// rotation, interleaved pairs and scaled frequencies need another table, or another order of the rows of the
// query and key projections, but no other operation. Read next: layers/attention/attention.h.
#pragma once

#include "layers/spec.h"

#include <vector>

namespace fp8flow {

// A head of `dim` dimensions, of which the `rotated` ones from `first` on rotate, as a checkpoint stores it.
// Interleaved: the pairs are (2i, 2i + 1) there, otherwise (i, i + rotated/2). Queries of multi-latent
// attention have first = qk_head_dim, linear_kv_down_proj has first = kv_lora_rank, both with dim = first +
// rotated.
struct RopeHead {
    int64_t dim = 0, rotated = 0, first = 0;
    bool interleaved = false;
};

// Row d of a head is row rope_rows(head)[d] of the checkpoint. Rows before `first` stay; of the others,
// rotated pairs come first in both halves. Applies to weights, biases, and gammas of the norms of queries and
// keys.
std::vector<int64_t> rope_rows(const RopeHead& head);

// [length, dim/2, 2] f32 cos and sin, computed in double. The first rotated/2 pairs rotate, the others have
// angle 0. Scaled frequencies: Transformers' modeling_rope_utils.
std::vector<float> rope_table(const ModelSpec& model, int64_t length, int64_t dim, int64_t rotated);

// The model's table of seq_length positions; rope_dims is the `dim` above.
std::vector<float> rope_table(const ModelSpec& model);
int64_t rope_dims(const ModelSpec& model);

// YaRN's factor of the softmax scale in multi-latent attention: m(mscale_all_dim)^2.
double rope_softmax_factor(const RopeSpec& rope);

// Dimensions of a head that rotate: rotary_percent of kv_channels, none of them with rope_type none.
int64_t rotated_dims(const ModelSpec& model);

}  // namespace fp8flow
