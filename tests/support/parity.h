// Runs one operation on the reference and on the Hopper backend with the same arguments and compares the outputs. The device gets copies of
// the host tensors, poison and guard zones included, so a byte that only one backend writes is noticed.
#pragma once

#include "kernels/hopper/hopper_ops.h"
#include "kernels/reference/reference_ops.h"
#include "tests/support/tensors.h"

#include <gtest/gtest.h>

#include <map>
#include <vector>

namespace fp8flow::test {

class Parity {
public:
    ReferenceOps cpu;
    HopperOps gpu;

    ~Parity() {
        for (auto& [host, copy] : copies_) gpu.device().free(copy.device);
        for (void* word : words_) gpu.device().free(word);
    }

    // The device's copy of a host tensor: uploaded on first use, the same afterwards. Call before the reference runs.
    TensorView to_gpu(const TensorView& host) {
        if (!host) return host;
        TensorView view = host;
        auto found = copies_.find(host.data);
        if (found == copies_.end()) {
            Copy copy{gpu.device().allocate(static_cast<std::size_t>(host.bytes()) + 2 * kGuard),
                      host.bytes()};
            gpu.device().fill(copy.device, kGuardByte, static_cast<std::size_t>(host.bytes()) + 2 * kGuard,
                              {});
            gpu.device().copy_in(copy.data(), host.data, static_cast<std::size_t>(host.bytes()), {});
            found = copies_.emplace(host.data, copy).first;
        }
        view.data = found->second.data();
        view.row_base = to_gpu_word(host.row_base);
        return view;
    }
    Fp8Tensor to_gpu(const Fp8Tensor& host) { return {to_gpu(host.codes), to_gpu(host.scales), host.layout}; }
    RowGroups to_gpu(RowGroups groups) {
        groups.counts = to_gpu(groups.counts);
        groups.offsets = to_gpu(groups.offsets);
        return groups;
    }
    const int64_t* to_gpu_word(const int64_t* word) {
        if (word == nullptr) return nullptr;
        void* device = gpu.device().allocate(sizeof(int64_t));
        gpu.device().copy_in(device, word, sizeof(int64_t), {});
        words_.push_back(device);
        return static_cast<const int64_t*>(device);
    }

    // What the device wrote for a host tensor; guard zones are checked.
    HostTensor from_gpu(const TensorView& host) {
        const Copy& copy = copies_.at(host.data);
        std::vector<uint8_t> all(static_cast<std::size_t>(copy.bytes) + 2 * kGuard);
        gpu.device().copy_out(all.data(), copy.device, all.size(), {});
        for (std::size_t i = 0; i < kGuard; ++i) {
            EXPECT_EQ(all[i], kGuardByte) << "guard zone before " << describe(host);
            EXPECT_EQ(all[all.size() - 1 - i], kGuardByte) << "guard zone behind " << describe(host);
        }
        HostTensor result(host.dtype, host.dims, host.rank);
        std::memcpy(result.view().data, all.data() + kGuard, static_cast<std::size_t>(copy.bytes));
        return result;
    }

    // After both backends ran: every byte of the tensor equal.
    void expect_same_bytes(const TensorView& host, const std::string& what) {
        if (!host) return;
        const HostTensor got = from_gpu(host);
        int64_t differences = 0;
        const int64_t width = size_of(host.dtype);
        for (int64_t i = 0; i < host.numel(); ++i) {
            if (std::memcmp(got.view().bytes_ptr() + i * width, host.bytes_ptr() + i * width,
                            static_cast<std::size_t>(width)) == 0)
                continue;
            if (++differences <= 3)
                ADD_FAILURE() << what << "[" << i << "] of " << describe(host) << ": hopper " << got(i)
                              << ", reference " << get(host, i);
        }
        EXPECT_EQ(differences, 0) << what << ": of " << host.numel();
    }
    void expect_same_bytes(const Fp8Tensor& host, const std::string& what) {
        expect_same_bytes(host.codes, what + ".codes");
        expect_same_bytes(host.scales, what + ".scales");
    }
    // Normalised mean square error of the device's values against the reference's at most `bound`; NaN must agree.
    void expect_close(const TensorView& host, double bound, const std::string& what) {
        const HostTensor got = from_gpu(host);
        double error = 0, energy = 0;
        for (int64_t i = 0; i < host.numel(); ++i) {
            const double want = get(host, i), have = got(i);
            ASSERT_EQ(std::isnan(want), std::isnan(have)) << what << "[" << i << "]";
            if (std::isnan(want)) continue;
            error += (have - want) * (have - want);
            energy += want * want;
        }
        EXPECT_LE(error, bound * energy + 1e-30)
            << what << ": NMSE " << (energy > 0 ? error / energy : error);
    }

private:
    static constexpr std::size_t kGuard = 256;
    static constexpr uint8_t kGuardByte = 0xA5;
    struct Copy {
        void* device;
        int64_t bytes;
        void* data() const { return static_cast<uint8_t*>(device) + kGuard; }
    };
    std::map<void*, Copy> copies_;
    std::vector<void*> words_;
};

}  // namespace fp8flow::test
