// SPDX-License-Identifier: MIT
// What the title of a picture says of a run: which model, on what, how large.
#pragma once

#include "model/base/provenance.h"
#include "model/config/config.h"

#include <string>

namespace fp8flow::report {

// "quickstart" of configs/quickstart.yaml; without a configuration the folder of the Hugging Face
// config.json.
std::string run_name(const std::string& config_path, const std::string& hf_config);
// "2 layers, hidden 256, 8 experts top-4 of width 256"
std::string model_shape(const Config& config);
// "4 GPUs" (NVIDIA H200), or "2 ranks" on the host's processor.
std::string device_count(const Provenance& provenance);
std::string device_name(const Provenance& provenance);

}  // namespace fp8flow::report
