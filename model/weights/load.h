// SPDX-License-Identifier: MIT
// Weights from files with Hugging Face names into the FP32 masters. Everything is looked up first: missing,
// extra and misshaped tensors are all listed at once, before the first value is changed. FP8 weights are
// dequantised with their scales, powers of two or not.
#pragma once

#include "model/config/config.h"
#include "model/train/transformer.h"
#include "model/weights/hf_names.h"

#include <set>
#include <string>
#include <vector>

namespace fp8flow::weights {

// A tensor of the model that a file holds values for.
struct WeightTarget {
    ParameterSpec spec;  // name and shape; of state that is no parameter (the expert bias), only these
    TensorView values;   // f32 on the device, spec.shape, or [n] of a sharded parameter
    Parameter* parameter = nullptr;  // gets its working copies afterwards, unless sharded; null: state
    int64_t first = 0;               // element of the tensor that values begin with
};
// Of all parameters of the model, and of the expert biases that its routers have.
std::vector<WeightTarget> targets_of(Transformer& model);
// The same with whole tensors where the model has slices of them, by all ranks together. They are gathered in
// the main gradients, which the next step overwrites, or in `scratch` where those are BF16.
std::vector<WeightTarget> whole_targets_of(Transformer& model, Exchange& exchange, Arena& scratch);
WeightTarget target_of(Parameter& parameter);
WeightTarget bias_target(int64_t layer, const TensorView& bias);

struct WeightShapes {
    const ModelSpec& model;
    const MoeSpec& moe;
};

struct LoadedWeights {
    int64_t tensors = 0, dequantised = 0;  // of the files, over all ranks' experts
};

// `scopes`: prefixes of tensor names. The files may have no other tensors under them than those that are
// loaded, `others`, and tables of the rotary embedding. A head that is tied to the embedding must equal it.
// Throws Error(data) with a line per problem; in the end also for values that are NaN or infinite. Each rank
// reads only what it holds. Where parameters are sharded the working copies are not written
// (ParameterStore::write_all_copies).
LoadedWeights load_weights(const TensorSet& set, const HfNames& names,
                           const std::vector<WeightTarget>& targets, const WeightShapes& shapes,
                           const std::vector<std::string>& scopes, ParameterStore& store, Device& device,
                           const std::set<std::string>& others = {});

// Detects the names of a whole model, and HfNames::dense_width.
HfNames names_of_model(const TensorSet& set, const Config& config, const std::string& family);

// The folder that --weights or --hf-config names, or that its file is in.
std::string folder_of_model(const std::string& path);

// A whole model from a file, an index or a folder; a config.json next to the weights gives the model_type and
// is compared with the configuration. Returns lines for the log.
std::vector<std::string> load_model(const std::string& path, const Config& config, Transformer& model,
                                    Device& device);

}  // namespace fp8flow::weights
