// SPDX-License-Identifier: MIT
// Runs one operation on the reference and on the Hopper backend with the same arguments and compares the
// outputs. The device gets copies of the host tensors, poison and guard zones included, so a byte that only
// one backend writes is noticed. Usual form:
//     Parity p;
//     p.check(op::QuantizeRows{.src = src, .groups = {}, .dst = dst});
#pragma once

#include "kernels/hopper/hopper_ops.h"
#include "kernels/reference/reference_ops.h"
#include "tests/support/cases.h"
#include "tests/support/op_arguments.h"
#include "tests/support/tensors.h"

#include <gtest/gtest.h>

#include <map>
#include <string>
#include <type_traits>
#include <utility>
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

    // Runs an operation on the GPU, twice from the same memory for the same bits, the second time as next to
    // work of other streams, and then on the reference.
    template <class Args> void run(const Args& args, Launch launch = {}) {
        const Args device = on_gpu(args);
        // A view that an earlier operation wrote has the reference's bits here: they may differ from the
        // GPU's in what a NaN carries.
        const auto upload = [&] {
            for_views(args, [&](const TensorView& view) {
                gpu.device().copy_in(device_address(view), view.data, static_cast<std::size_t>(view.bytes()),
                                     {});
            });
        };
        upload();
        call(gpu, device, launch);
        const auto once = snapshot(args);
        upload();
        launch.shared_device = true;
        call(gpu, device, launch);
        EXPECT_TRUE(snapshot(args) == once) << "the second call gave other bits";
        call(cpu, args);
    }
    // run(), then every byte of every tensor of the arguments is the same on both sides, also of inputs,
    // which nothing may write.
    template <class Args> void check(const Args& args, const Launch& launch = {}) {
        run(args, launch);
        compare(args, [](double, double) { return false; });
    }
    // The same, but a NaN only has to be a NaN on both sides: its payload is the processor's own.
    template <class Args> void check_values(const Args& args, const Launch& launch = {}) {
        run(args, launch);
        compare(args, [](double a, double b) { return std::isnan(a) && std::isnan(b); });
    }
    // The arguments with every view in device memory.
    template <class Args> Args on_gpu(Args args) {
        each_view(args, [this](auto& member) {
            if constexpr (std::is_same_v<std::decay_t<decltype(member)>, const int64_t*>)
                member = to_gpu_word(member);
            else
                member = to_gpu(member);
        });
        return args;
    }

    // The device's copy of a host tensor: uploaded on first use, the same afterwards. Call before the
    // reference runs. A part of a tensor that was given as a whole before lies in its copy.
    TensorView to_gpu(const TensorView& host) {
        if (!host) return host;
        TensorView view = host;
        if (copy_of(host) == nullptr) {
            Copy copy{gpu.device().allocate(static_cast<std::size_t>(host.bytes()) + 2 * kGuard),
                      host.bytes()};
            gpu.device().fill(copy.device, kGuardByte, static_cast<std::size_t>(host.bytes()) + 2 * kGuard,
                              {});
            gpu.device().copy_in(copy.data(), host.data, static_cast<std::size_t>(host.bytes()), {});
            copies_.emplace(host.bytes_ptr(), copy);
        }
        view.data = device_address(host);
        view.row_base = to_gpu_word(host.row_base);
        return view;
    }
    ScaledTensor to_gpu(const ScaledTensor& host) {
        return {to_gpu(host.data), to_gpu(host.scales), host.layout, host.format};
    }
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

    // What the device wrote for a host tensor, or for a part of one; guard zones are checked.
    HostTensor from_gpu(const TensorView& host) {
        const auto& [whole, copy] = *copy_of(host);
        std::vector<uint8_t> all(static_cast<std::size_t>(copy.bytes) + 2 * kGuard);
        gpu.device().copy_out(all.data(), copy.device, all.size(), {});
        for (std::size_t i = 0; i < kGuard; ++i) {
            EXPECT_EQ(all[i], kGuardByte) << "guard zone before " << describe(host);
            EXPECT_EQ(all[all.size() - 1 - i], kGuardByte) << "guard zone after " << describe(host);
        }
        HostTensor result(host.dtype, host.dims, host.rank);
        std::memcpy(result.view().data, all.data() + kGuard + (host.bytes_ptr() - whole),
                    static_cast<std::size_t>(host.bytes()));
        return result;
    }

    // After both backends ran: every byte of the tensor equal.
    void expect_same_bytes(const TensorView& host, const std::string& what) {
        if (!host) return;
        expect_same(host, what, [](double, double) { return false; });
    }
    void expect_same_bytes(const ScaledTensor& host, const std::string& what) {
        expect_same_bytes(host.data, what + ".codes");
        expect_same_bytes(host.scales, what + ".scales");
    }
    // Normalised mean square error of the device's values against the reference's at most `bound`; NaN must
    // agree.
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
        uint8_t* data() const { return static_cast<uint8_t*>(device) + kGuard; }
    };

    const std::pair<const uint8_t* const, Copy>* copy_of(const TensorView& host) const {
        auto found = copies_.upper_bound(host.bytes_ptr());
        if (found == copies_.begin()) return nullptr;
        --found;
        const int64_t offset = host.bytes_ptr() - found->first;
        return offset == 0 || offset < found->second.bytes ? &*found : nullptr;
    }
    void* device_address(const TensorView& host) const {
        const auto* found = copy_of(host);
        return found->second.data() + (host.bytes_ptr() - found->first);
    }
    template <class Args, class F> void for_views(Args args, F f) {
        each_view(args, [&](auto& member) {
            using Member = std::decay_t<decltype(member)>;
            std::vector<TensorView> views;
            if constexpr (std::is_same_v<Member, TensorView>) views = {member};
            if constexpr (std::is_same_v<Member, ScaledTensor>) views = {member.data, member.scales};
            if constexpr (std::is_same_v<Member, RowGroups>) views = {member.counts, member.offsets};
            for (const TensorView& view : views)
                if (view) f(view);
        });
    }
    // What the device holds of the arguments' tensors.
    template <class Args> std::vector<std::vector<uint8_t>> snapshot(const Args& args) {
        std::vector<std::vector<uint8_t>> all;
        for_views(args, [&](const TensorView& view) {
            all.emplace_back(static_cast<std::size_t>(view.bytes()));
            gpu.device().copy_out(all.back().data(), device_address(view), all.back().size(), {});
        });
        return all;
    }
    template <class Args, class Also> void compare(const Args& args, Also also) {
        op::each_field(args, [&](const std::string& name, const auto& member) {
            using Member = std::decay_t<decltype(member)>;
            const auto same = [&](const TensorView& view, const char* part) {
                if (view) expect_same(view, name + part, also);
            };
            if constexpr (std::is_same_v<Member, TensorView>) same(member, "");
            if constexpr (std::is_same_v<Member, ScaledTensor>)
                same(member.data, ".data"), same(member.scales, ".scales");
            if constexpr (std::is_same_v<Member, RowGroups>)
                same(member.counts, ".counts"), same(member.offsets, ".offsets");
            if constexpr (op::HasFields<Member>) compare(member, also);
        });
    }
    // Every element equal byte by byte, or accepted by `also(hopper, reference)`.
    template <class Also> void expect_same(const TensorView& host, const std::string& what, Also also) {
        const HostTensor got = from_gpu(host);
        if (same_bytes(got, host)) return;
        int64_t differences = 0;
        const int64_t width = size_of(host.dtype);
        for (int64_t i = 0; i < host.numel(); ++i) {
            if (std::memcmp(got.view().bytes_ptr() + i * width, host.bytes_ptr() + i * width,
                            static_cast<std::size_t>(width)) == 0 ||
                also(got(i), get(host, i)))
                continue;
            if (++differences <= 3)
                ADD_FAILURE() << what << "[" << i << "] of " << describe(host) << ": hopper " << got(i)
                              << ", reference " << get(host, i);
        }
        EXPECT_EQ(differences, 0) << what << ": of " << host.numel();
    }

    std::map<const uint8_t*, Copy> copies_;
    std::vector<void*> words_;
};

}  // namespace fp8flow::test
