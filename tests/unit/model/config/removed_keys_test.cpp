// SPDX-License-Identifier: MIT
// Texts of earlier versions: ignored where their value changed nothing, refused otherwise.
#include "model/config/fields.h"
#include "tests/support/settings.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

namespace fp8flow {
namespace {

// A value that changed nothing is ignored, silently for a key of Megatron's; any other is refused.
TEST(RemovedKeys, AreIgnoredOrRefused) {
    struct Case {
        const char *section, *key, *ignored, *refused, *answer;
    };
    const Case cases[] = {
        {"kernels", "gemm_backend", "auto", "cublaslt", "which is no longer there"},
        {"kernels", "gemm_backend", "native", "cublaslt", "docs/performance/kernels.md"},
        {"precision", "fault_wrong_scale_index", "false", "true", "examples/planted_faults.cpp"},
        {"training", "max_skipped_iters", "10", "3", "training.on_divergence"},
        {"training", "max_rollbacks", "3", "8", "training.on_divergence"},
        {"training", "zero_grad_iters", "0", "5", "training.grad_norm_limit"},
        {"training", "main_params_dtype", "fp32", "bf16", "want fp32 (master weights are FP32)"},
        {"model", "swiglu", "True", "false",
         "want true (units are gated; quick_geglu: true is the other one)"},
    };
    for (const Case& c : cases) {
        SCOPED_TRACE(c.key);
        const bool megatron = std::string_view(c.answer).starts_with("want ");
        const Config config = parse_config(fmt::format("{}:\n  {}: {}\n", c.section, c.key, c.ignored), "t");
        ASSERT_EQ(config.warnings.size(), megatron ? 0u : 1u);
        if (!megatron) {
            expect_contains(config.warnings[0], " is no key any more and is ignored: ");
        }
        const std::string refused = config_error(fmt::format("{}:\n  {}: {}\n", c.section, c.key, c.refused));
        EXPECT_EQ(refused.rfind(fmt::format("t.yaml:2:{}: {}.{}: got {}, ", 5 + std::string(c.key).size(),
                                            c.section, c.key, c.refused),
                                0),
                  0u)
            << refused;
        expect_contains(refused, c.answer);
    }
    expect_contains(config_error("model: {}", {"gemm_backend=cublaslt"}), "no longer there");
    EXPECT_EQ(config_error("model: {}", {"kernels.gemm_backend=native"}), "");
    expect_contains(config_error("model: {}", {"model.gemm_backend=native"}), "got an unknown key");
}

// A checkpoint of an earlier version names them with any value.
TEST(RemovedKeys, LeaveADump) {
    const std::string kept = without_old_keys(
        "training:\n  seed: 7\n  max_rollbacks: 8\n  main_params_dtype: fp32\nkernels:\n  gemm_backend: "
        "cublaslt\n");
    EXPECT_EQ(kept, "training:\n  seed: 7\nkernels:\n");
}

}  // namespace
}  // namespace fp8flow
