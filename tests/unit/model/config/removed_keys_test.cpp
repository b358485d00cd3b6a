// SPDX-License-Identifier: MIT
// Keys of earlier versions: ignored with a note where their value changed nothing, refused otherwise.
#include "kernels/core/error.h"
#include "model/config/config.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

namespace fp8flow {
namespace {

std::string error_of(const std::string& yaml, const std::vector<std::string>& overrides = {}) {
    try {
        parse_config(yaml, "t.yaml", overrides);
        return {};
    } catch (const Error& error) {
        return error.what();
    }
}

// Files and checkpoints of earlier versions name every key.
TEST(RemovedKeys, AreIgnoredOrRefused) {
    for (const char* old : {"auto", "native"}) {
        const Config config = parse_config(fmt::format("kernels:\n  gemm_backend: {}\n", old), "t.yaml");
        ASSERT_EQ(config.warnings.size(), 1u) << old;
        EXPECT_EQ(config.warnings[0].rfind(
                      "t.yaml:2:3: kernels.gemm_backend is no key any more and is ignored: ", 0),
                  0u)
            << config.warnings[0];
    }
    const std::string refused = error_of("kernels:\n  gemm_backend: cublaslt\n");
    EXPECT_EQ(refused.rfind("t.yaml:2:3: kernels.gemm_backend: got cublaslt, which is no longer there: ", 0),
              0u)
        << refused;
    EXPECT_NE(error_of("model: {}", {"gemm_backend=cublaslt"}).find("no longer there"), std::string::npos);
    EXPECT_EQ(error_of("model: {}", {"kernels.gemm_backend=native"}), "");
    EXPECT_NE(error_of("model: {}", {"model.gemm_backend=native"}).find("got an unknown key"),
              std::string::npos);
}

}  // namespace
}  // namespace fp8flow
