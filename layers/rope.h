// SPDX-License-Identifier: MIT
// Rotary position embedding as data for op::Rope, which rotates the pairs (i, i + D/2) of a head by a table.
// Partial rotation, interleaved pairs and scaled frequencies are other tables, and another order of the rows
// of the query and key projections: the device has one operation. Read next: layers/attention/attention.h.
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

// Our row d of a head is row rope_rows(head)[d] of the checkpoint: those before `first` stay, and of the
// others rotated pairs come first in both halves. It applies to every row of a head's queries and keys:
// weights, biases, and gammas of their norms.
std::vector<int64_t> rope_rows(const RopeHead& head);

// [length, dim/2, 2] f32 cos and sin, computed in double. The first rotated/2 pairs turn, the other ones have
// angle 0. Scaled frequencies: Transformers' modeling_rope_utils.
std::vector<float> rope_table(const ModelSpec& model, int64_t length, int64_t dim, int64_t rotated);

// The model's table of seq_length positions; rope_dims is the `dim` above.
std::vector<float> rope_table(const ModelSpec& model);
int64_t rope_dims(const ModelSpec& model);

// What YaRN multiplies the softmax scale of multi-latent attention by: m(mscale_all_dim)^2.
double rope_softmax_factor(const RopeSpec& rope);

// Dimensions of a head that rotate: rotary_percent of kv_channels, none of them with rope_type none.
int64_t rotated_dims(const ModelSpec& model);

}  // namespace fp8flow
