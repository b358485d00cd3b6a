// SPDX-License-Identifier: MIT
// `fp8flow train --dump-samples N`: the token windows that a run would read, as a NumPy file, so that another
// program trains on the same tokens. Nothing is trained.
#include "model/base/output.h"
#include "model/commands/commands.h"
#include "model/report/run_report.h"
#include "model/train/trainer.h"

#include <fmt/core.h>

#include <bit>

namespace fp8flow {

namespace {

constexpr const char* kSamplesFile = "samples.npy";

// NumPy's format 1.0: magic, version, length of the header, the header padded so that the data begin at a
// multiple of 64 bytes. https://numpy.org/doc/stable/reference/generated/numpy.lib.format.html
std::string npy_header(int64_t rows, int64_t columns) {
    static_assert(std::endian::native == std::endian::little);
    constexpr size_t kPrefix = 10, kAlignment = 64;
    std::string header =
        fmt::format("{{'descr': '<i4', 'fortran_order': False, 'shape': ({}, {}), }}", rows, columns);
    const size_t unpadded = kPrefix + header.size() + 1;
    header.append((kAlignment - unpadded % kAlignment) % kAlignment, ' ');
    header += '\n';
    const auto length = static_cast<uint16_t>(header.size());
    return std::string("\x93NUMPY\x01\x00", 8) + static_cast<char>(length & 0xFF) +
           static_cast<char>(length >> 8) + header;
}

void write_samples(const OutputFolder& folder, const data::TokenSource& source, int64_t count) {
    std::vector<int32_t> window(to_size(source.seq_length() + 1));
    AtomicFile file = folder.create_atomic(kSamplesFile);
    const std::string header = npy_header(count, source.seq_length() + 1);
    file.write(header.data(), header.size());
    for (int64_t i = 0; i < count; ++i) {
        source.sample(data::Split::train, i, window);
        file.write(window.data(), window.size() * sizeof(int32_t));
    }
    file.commit();
}

}  // namespace

int run_dump_samples(const Options& options, ProcessGroup& world) {
    Config config = load_config(options.config_path, options.overrides, world.size(), options.hf_config);
    require(config.checkpoint.load.empty(), ExitCode::usage,
            "--dump-samples: got checkpoint.load = {}, want none: the windows are those of a run from its "
            "first iteration",
            config.checkpoint.load);
    RunFolder run_folder(run_folder_of(options, config.output.out), world);
    report::RunLog log(world.rank(), options.detail);
    if (!run_folder.note().empty()) log.line(run_folder.note());
    const auto source = open_data(config);
    report::report_data(log, config, *source);
    run_folder.keep();
    if (run_folder.is_first_rank()) write_samples(run_folder.folder(), *source, options.dump_samples);
    world.barrier();
    if (run_folder.is_first_rank())
        log.result(
            "written: {}: {} windows of {} tokens, int32; iteration i reads windows {} i to "
            "{} i + {}, i from 0",
            run_folder.folder().path_of(kSamplesFile), options.dump_samples, source->seq_length() + 1,
            config.training.global_batch_size, config.training.global_batch_size,
            config.training.global_batch_size - 1);
    return 0;
}

}  // namespace fp8flow
