// SPDX-License-Identifier: MIT
// The program: reads the command line, starts the ranks, reports errors once. It and launcher.cpp are all
// that reads the environment, apart from the libraries (MPI, CUDA, OpenMP) themselves. Read next: commands.h.
// Long because the options of all commands are one table.
#include "kernels/core/error.h"
#include "kernels/host_memory.h"
#include "layers/flows/flow.h"
#include "model/base/plugins.h"
#include "model/commands/commands.h"
#include "model/commands/next_steps.h"
#include "model/commands/option_types.h"
#include "model/config/config.h"
#include "model/config/fields.h"
#include "model/config/hf_families.h"
#include "model/job/host_cores.h"
#include "model/job/launcher.h"
#include "model/job/mpi_session.h"
#include "model/job/stop_signals.h"
#include "model/job/watchdog.h"
#include "model/safetensors/header.h"

#include <fcntl.h>
#include <fmt/core.h>
#include <omp.h>
#include <sys/stat.h>
#include <unistd.h>
#include <CLI/CLI.hpp>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <climits>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <new>
#include <optional>
#include <sstream>
#include <string>
#include <system_error>
#include <thread>

namespace {

using namespace fp8flow;

// Returns 0 where there is nothing to report.
int exit_code_of(std::exception_ptr error, std::string& message) {
    try {
        std::rethrow_exception(error);
    } catch (const Error& e) {
        message = e.what();
        return static_cast<int>(e.code());
    } catch (const std::bad_alloc&) {
        message = out_of_host_memory(0);
        return static_cast<int>(ExitCode::memory);
    } catch (const std::system_error& e) {
        message = e.what();
        if (std::ferror(stdout) != 0) {
            message = fmt::format("standard output cannot be written: {}", e.code().message());
            // A reader that has gone (`| head`) has read enough.
            return e.code().value() == EPIPE ? 0 : static_cast<int>(ExitCode::output);
        }
        // a folder or a thread that found no memory
        if (e.code() == std::errc::not_enough_memory ||
            e.code() == std::errc::resource_unavailable_try_again) {
            message += ": " + out_of_host_memory(0);
            return static_cast<int>(ExitCode::memory);
        }
    } catch (const std::exception& e) {
        message = e.what();
    }
    return static_cast<int>(ExitCode::internal);
}

// What the environment says of this process; read once.
const JobStart& job_start() {
    static const JobStart read = read_job_start();
    return read;
}

// "fp8flow: error: " and the message; several problems are listed on the lines below it.
void print_error(const std::string& message) {
    constexpr size_t kLongestLine = 4096;
    const auto lines = 1 + std::ranges::count(message, '\n');
    std::string text = lines > 1 ? fmt::format("{} problems\n", lines) : "";
    for (size_t begin = 0, end = 0; end != std::string::npos; begin = end + 1) {
        end = message.find('\n', begin);
        text += printable(std::string_view(message).substr(begin, end - begin), kLongestLine);
        if (end != std::string::npos) text += '\n';
    }
    for (size_t at = text.find('\n'); at != std::string::npos; at = text.find('\n', at + 3))
        text.replace(at, 1, "\n  ");
    print_err("fp8flow: error: " + text + "\n");
}

// Ends the job with one report: ranks wait for their turn, and the first one reports and aborts the others.
[[noreturn]] void report_and_abort(MpiSession& mpi, std::exception_ptr error) {
    constexpr std::chrono::milliseconds kTurn{150}, kLongestTurn{3000}, kForTheEnd{10000};
    std::string message;
    const int code = exit_code_of(error, message);
    note_failure();
    // A lost peer is the consequence of another rank's error: that rank reports first.
    const int turn = mpi.rank() + (code == static_cast<int>(ExitCode::peer) ? mpi.size() : 0);
    std::this_thread::sleep_for(std::min(kLongestTurn, kTurn * turn));
    if (mpi.claim_report()) {
        if (code != 0) print_error(message);
    } else {
        std::this_thread::sleep_for(kForTheEnd);
    }
    mpi.abort(code);
}

constexpr double kStartDeadline = 300;

// The launcher's process is the parent of the ranks of a host.
Watchdog::Job watched_job() {
    std::string name = fmt::format("{} since {}", ::getppid(), process_start(::getppid()));
    for (const char* part : {"PMIX_NAMESPACE", "SLURM_JOB_ID", "SLURM_STEP_ID"})
        if (const char* value = std::getenv(part)) name += fmt::format(" {}", value);
    const Placement& place = job_start().placement;
    return {.name = name,
            .rank = static_cast<int>(job_start().rank),
            .rank_on_host = static_cast<int>(place.rank_on_host),
            .ranks_on_host = static_cast<int>(place.ranks_on_host),
            .size = static_cast<int>(place.num_ranks)};
}

// A standard descriptor that is closed would be the next file's, which would get the output.
void keep_descriptors() {
    int descriptor = 0;
    while (descriptor >= 0 && descriptor <= STDERR_FILENO) descriptor = ::open("/dev/null", O_RDONLY);
    if (descriptor >= 0) ::close(descriptor);
}

// OpenMP's threads spin after every loop by default, which takes the cores from other ranks and programs. The
// OpenMP library reads its environment before main, so the program starts itself once more, before MPI and
// before any thread; ignored signals, open files and the process stay. A choice of the user's stays too.
void wait_passively(char** argv) {
    if (std::getenv("OMP_WAIT_POLICY") != nullptr || std::getenv("GOMP_SPINCOUNT") != nullptr) return;
    ::setenv("OMP_WAIT_POLICY", "passive", 1);
    constexpr const char* kSelf = "/proc/self/exe";
    char path[PATH_MAX + 1] = {};
    struct stat self {
    }, named{};
    // Under its own name, for tools that look for it, unless another file has that name by now.
    if (::readlink(kSelf, path, PATH_MAX) < 0 || ::stat(kSelf, &self) != 0 || ::stat(path, &named) != 0 ||
        self.st_dev != named.st_dev || self.st_ino != named.st_ino)
        return;
    ::execv(path, argv);
}

// The ranks of a host share the cores that affinity and CPU quota leave, unless the user or mpirun's binding
// has decided already.
void choose_threads(int64_t ranks) {
    if (std::getenv("OMP_NUM_THREADS") != nullptr || std::getenv("OMPI_MCA_orte_bound_at_launch") != nullptr)
        return;
    omp_set_num_threads(std::max(1, usable_cores(omp_get_num_procs()) / static_cast<int>(ranks)));
}

// Runs `command` on every rank.
template <class Options> int on_ranks(const Options& options, int (*command)(const Options&, ProcessGroup&)) {
    // Before the first NCCL call: communicators need no multicast memory, which some machines refuse. A value
    // of the user's stays.
    ::setenv("NCCL_NVLS_ENABLE", "0", 0);
    MpiSession mpi;
    try {
        require_same_size(job_start(), mpi.size());
        check_processor();
        choose_threads(options.placement.ranks_on_host);
        double deadline = 300;  // a rank may read weights or draw random data for minutes while others wait
        constexpr bool kTrains = std::is_same_v<Options, RunOptions>;
        if constexpr (kTrains || std::is_same_v<Options, EvaluateOptions> ||
                      std::is_same_v<Options, GenerateOptions>)
            if (options.joined.empty()) {
                const std::optional<int64_t> ranks =
                    kTrains ? std::optional<int64_t>(mpi.size()) : std::nullopt;
                deadline = load_config(options.config_path, options.overrides, ranks, options.hf_config)
                               .parallel.peer_deadline_seconds;
            }
        Watchdog::set_deadline(deadline, "parallel.peer_deadline_seconds");
        const auto world = make_mpi_group(deadline);
        return command(options, *world);
    } catch (...) {
        report_and_abort(mpi, std::current_exception());
    }
}

// The command as it was typed, with the ranks it was started on.
std::string typed(int argc, char** argv) {
    std::string text = "fp8flow";
    const int64_t ranks = job_start().placement.num_ranks;
    if (ranks > 1) text = fmt::format("mpirun -n {} fp8flow", ranks);
    for (int i = 1; i < argc; ++i) text += " " + shell_word(argv[i]);
    return text;
}

// For what needs no ranks. Returns the exit code.
int report_here(std::exception_ptr error) {
    std::string message;
    const int code = exit_code_of(error, message);
    if (code != 0) print_error(message);
    return code;
}

// What is wrong with the command line, every rank of a job sees.
int report_usage(std::exception_ptr error) {
    if (!job_start().launched) return report_here(error);
    MpiSession mpi;
    report_and_abort(mpi, error);
}

struct CommandLine {
    CLI::App app{"fp8flow: trains a Mixture-of-Experts transformer with a casting-free FP8 flow"};
    CLI::App* train = app.add_subcommand("train", "train the model of a configuration");
    CLI::App* validate =
        app.add_subcommand("validate", "train under every recipe of validate.recipes and compare the losses");
    CLI::App* profile = app.add_subcommand(
        "profile", "time, bytes and memory of every stage of the MoE layer, recipes side by side");
    CLI::App* plan = app.add_subcommand(
        "plan", "print parameters, FLOPs, memory, wire bytes and a predicted step without running");
    CLI::App* replay = app.add_subcommand(
        "replay",
        "one MoE layer forward and backward on tensors from a safetensors file, to compare with yours");
    CLI::App* evaluate = app.add_subcommand(
        "evaluate", "held-out loss, bits per byte and next-token accuracy of a trained model");
    CLI::App* generate = app.add_subcommand(
        "generate", "continue a prompt with a trained model; a token takes a pass over the whole text");
    CLI::App* bench = app.add_subcommand(
        "bench", "time single operations and compare them with the ceilings of the machine");
    CLI::App* families = app.add_subcommand(
        "families", "list the families of models: whole, by their MoE layers alone, or refused, and why");
    CLI::App* doctor = app.add_subcommand(
        "doctor", "check what runs need of this machine, and print what installs what is missing");
    RunOptions options;
    ReplayOptions replay_options;
    BenchOptions bench_options;
    PlanOptions plan_options;
    EvaluateOptions evaluate_options;
    GenerateOptions generate_options;
    std::string backend = "auto", out, json, resume, weights, export_format, record_routing;
    std::vector<std::string> recipes, plan_recipes;
    int64_t steps = 0;
    double start_deadline = kStartDeadline, mhz = 0, network = 0;
    bool help_config = false, list = false, tensor_stats = false, ablate = false, schedules = false,
         state_dtypes = false;
    bool families_markdown = false;
    bool overwrite = false, take_over = false, force = false, quiet = false, verbose = false;
    std::vector<std::string> compared;

    CommandLine() {
        app.require_subcommand(0, 1);
        app.set_version_flag("--version", "fp8flow " FP8FLOW_VERSION);
        app.add_flag("--help-config", help_config,
                     "print every configuration key with type, range, default and meaning");
        families->add_flag("--markdown", families_markdown, "as the table of docs/usage/data_and_weights.md");
        app.footer(
            "Exit status: 0 done, 1 validate's verdict is not pass, 2 command line or configuration, "
            "10 data, 11 checkpoint, 12 memory, 13 a step diverged,\n14 another rank was lost, "
            "15 output folder, 16 stopped by a signal after a step, 70 a fault of fp8flow.\n"
            "Several ranks: mpirun -n N --quiet fp8flow train CONFIG (or scripts/train.sh -n N CONFIG).");
        for (CLI::App* command : {train, validate, profile, plan, replay}) {
            command->add_option("config", options.config_path, "YAML configuration (see configs/)")
                ->required(command == train);
            add_repeated(command, "--set", options.overrides, "section.key=value, repeatable");
            command->add_option("--out", out, "folder for everything the run writes (default: output.out)")
                ->take_last();
            command->add_option(
                "--hf-config", options.hf_config,
                "config.json of a Hugging Face model: fills model and moe; the configuration and "
                "--set come after it (families: docs/usage/data_and_weights.md)");
        }
        doctor->add_option("--out", out, "folder that runs will write to (default: runs)");
        for (CLI::App* command : {train, validate, profile, plan, replay})
            add_repeated(command, "--plugin", options.plugins,
                         "shared library with recipes of your own (include/fp8flow/recipe.h), "
                         "repeatable; validate "
                         "and profile compare them with the others");
        for (CLI::App* command : {train, validate, profile, replay, bench})
            command->add_flag("--overwrite", overwrite,
                              "write into --out though it holds an earlier run (otherwise: into --out-2, "
                              "--out-3, ...); train removes that run's checkpoints");
        for (CLI::App* command : {train, validate, profile, replay, bench})
            command->add_flag(
                "--take-over", take_over,
                "take --out from the run that holds it, which ends at its next look (a run on a "
                "lost machine; a file system without locks)");
        for (CLI::App* command : {train, validate, profile})
            command->add_flag("--force", force, "start a run though it will not fit into memory");
        for (CLI::App* command : {train, validate, profile, bench})
            command->add_flag("--quiet", quiet,
                              command == bench
                                  ? "no line for each row that is measured"
                                  : "print warnings and the result only; the log has every line");
        for (CLI::App* command : {train, validate, profile, replay})
            command->add_option("--backend", backend, "auto | reference | hopper")->take_last();
        for (CLI::App* command : {train, validate, profile, replay, bench})
            add_number(command, "--start-deadline", start_deadline, {.max = 1e6},
                       "seconds that a rank waits for the others until the configuration is read, 0: "
                       "for ever (default: 300)");
        for (CLI::App* command : {validate, profile}) {
            command->add_flag("--ablate", ablate,
                              "also run fp8_flow with each of its optimisations switched off, one at a time");
            command
                ->add_flag("--state-dtypes", state_dtypes,
                           "every recipe with FP32 gradients and moments, with BF16 gradients, and with all "
                           "in BF16")
                ->excludes("--ablate");
        }
        add_trained_options({evaluate, generate}, options, backend);
        add_evaluate_options(*evaluate, evaluate_options, out, quiet);
        add_generate_options(*generate, generate_options);
        add_train_options();
        add_validate_options(*validate, options, resume, weights);
        add_profile_options();
        add_replay_options();
        add_bench_options();
        add_plan_options();
    }

    void add_profile_options() {
        profile
            ->add_flag(
                "--schedules", schedules,
                "every recipe serial, with the shared expert, the weight gradients, both and the gradient "
                "reduction overlapped, interleaved micro-batches, a step as one graph (section schedule)")
            ->excludes("--ablate")
            ->excludes("--state-dtypes");
        profile
            ->add_option("--compare", compared,
                         "OLD NEW: print two results (profile.json or run folders) side by side, the "
                         "largest difference first, and run nothing; with --out the picture compare.html")
            ->expected(2);
        add_list(profile, "--recipes", recipes, "comma-separated (default: profile.profile_recipes)");
        add_integer(profile, "--steps", steps, {.min = 1, .max = 100000},
                    "steps that are measured (default: profile_step_end - profile_step_start)");
    }

    void add_train_options() {
        train->add_flag("--verbose", verbose, "step lines with every field of Megatron-LM's")
            ->excludes("--quiet");
        train->add_option("--weights", weights,
                          "start from a Hugging Face model: a .safetensors file, an index, or a folder");
        train
            ->add_option("--export", export_format,
                         "bf16 | f32 | fp8: in the end write the weights with Hugging Face names to OUT/hf")
            ->check(CLI::IsMember({"bf16", "f32", "fp8"}));
        add_integer(train, "--dump-samples", options.dump_samples, {.min = 1, .max = int64_t{1} << 31},
                    "N: write the first N token windows that the run would read to OUT/samples.npy, and "
                    "train nothing");
        train
            ->add_option(
                "--resume", resume,
                "resume from a checkpoint: auto (the newest complete one below --out, or start "
                "afresh), or a run's folder, its folder of checkpoints, or one of them (checkpoint.load)")
            ->take_last();
        train->add_option("--routing", options.routing,
                          "a file with the experts of every token, in place of the routers' choices "
                          "(data.routing_path)");
        train->add_option("--record-routing", record_routing,
                          "write the experts that the routers choose to this file (output.record_routing)");
        train->add_flag("--tensor-stats", tensor_stats,
                        "report underflow, saturation, scales and error of every quantised tensor");
    }

    void add_replay_options() {
        replay->add_option("--input", replay_options.input, "safetensors with hidden_states and grad_output")
            ->required();
        replay->add_option(
            "--weights", options.weights,
            "safetensors with the layer's weights: a file, an index, or a folder (default: --input)");
        add_integer(replay, "--layer", replay_options.layer, {.max = 100000},
                    "its number in the weights (default: 0)");
        replay->add_flag("--norm", replay_options.norm,
                         "apply post_attention_layernorm in front of the layer");
        replay->add_option("--routing", options.routing,
                           "safetensors with the experts of every token, in place of the router's choice");
        replay->add_flag("--intermediates", replay_options.intermediates,
                         "also write what the experts received and computed, by stage");
    }

    void add_plan_options() {
        add_list(plan, "--gpus", plan_options.gpus,
                 "number of ranks (default: parallel.expert_model_parallel_size); several, 8,64,512: a table")
            ->transform(integer_in({.min = 1, .max = 1 << 20}));
        plan->add_option("--gpu", plan_options.gpu,
                         "h100 | h200 | h20 | h800, or a file: like those of configs/gpus, or made by "
                         "scripts/calibrate.py (default: h200)")
            ->take_last();
        add_list(plan, "--recipes", plan_recipes, "of the table (default: bf16,fp8_blockwise,fp8_flow)");
        add_list(plan, "--ep", plan_options.expert_parallel, "expert-parallel sizes of the table")
            ->transform(typed(*find_leaf("expert_model_parallel_size")));
        add_list(plan, "--micro-batch", plan_options.micro_batches, "micro-batch sizes of the table")
            ->transform(typed(*find_leaf("micro_batch_size")));
        add_number(plan, "--mhz", mhz, {.min = 100, .max = 10000},
                   "clock of the GPU under load (default: the calibration's)");
        add_number(plan, "--network", network, {.min = 0.01, .max = 10000},
                   "GB/s of each GPU between hosts (default: the kind's)");
        plan->add_flag("--markdown", plan_options.markdown, "print the table alone, as Markdown");
        plan->add_option("--json", json, "also write the plan to this file below --out");
        plan->add_option("--picture", plan_options.picture, "also write the report as NAME.html below --out");
    }

    void add_bench_options() {
        bench->add_option("operations", bench_options.operations, "operations to time (--list)");
        add_repeated(bench, "--shape", bench_options.shapes,
                     "key=value,key=value of every named operation, repeatable");
        bench->add_option("--suite", bench_options.suite,
                          "exchange | gemm | layer | model | small | upstream, or a file "
                          "(configs/suites/README.md), or what it "
                          "has of the named operations");
        bench->add_option("--match", bench_options.match,
                          "regular expression: only what matches in 'operation key=value key=value ...'");
        bench->add_flag("--list", list, "print operations, their keys and the suites");
        bench->add_option("--out", bench_options.out, "folder for report.html, bench.json and bench.txt");
        bench
            ->add_flag(
                "--capture", bench_options.capture,
                "do not time: run one call of each row between cudaProfilerStart and Stop, in an NVTX range "
                "(ncu --profile-from-start off)")
            ->excludes("--out");
        bench
            ->add_flag(
                "--describe", bench_options.describe,
                "do not time: names, dtypes, shapes and layouts of the tensors, as a --plugin gets them")
            ->excludes("--out")
            ->excludes("--capture");
        bench->add_option("--backend", backend, "auto | reference | hopper")->take_last();
        bench->add_option(
            "--plugin", options.plugin,
            "shared library with kernels of your own (include/fp8flow/plugin.h): results are compared "
            "with these, and both are timed");
        add_integer(bench, "--samples", bench_options.samples, {.min = 1, .max = 100000},
                    "timed samples of a burst (default: 30)");
        add_number(bench, "--idle", bench_options.idle_seconds, {.max = 60},
                   "seconds of rest before a burst (default: 0.8)");
        add_number(bench, "--sustain", bench_options.sustained_seconds, {.max = 60},
                   "seconds of calls back to back, 0: none (default: 0.8)");
    }

    // The command that a misspelt word may mean; empty if there is none.
    std::string meant_by(const std::string& word) const {
        std::vector<std::string> commands;
        for (const CLI::App* command : app.get_subcommands([](const CLI::App*) { return true; })) {
            if (command->get_name() == word) return {};
            commands.push_back(command->get_name());
        }
        return nearest_name(word, commands);
    }

    // Throws CLI::ParseError and Error.
    void parse(int argc, char** argv) {
        require_values(argc, argv);
        app.parse(argc, argv);
        for (const std::string& recipe : plan_recipes) plan_options.recipes.push_back(recipe_named(recipe));
        require(
            !*profile || compared.empty() == (!options.config_path.empty() || !options.hf_config.empty()),
            ExitCode::usage,
            "profile: want a configuration (see configs/), --hf-config config.json, or --compare OLD NEW");
        if (*validate) complete_validate_options(options);
        if (*evaluate || *generate) complete_trained_options(options, out);
        if (!*bench)
            for (const std::string& plugin : options.plugins) load_recipes(plugin);
        // All of them are compared.
        if ((*validate || *profile) && registered_flows().size() > 1)
            options.overrides.insert(options.overrides.begin(), "precision.flow=''");
        const auto set = [&](const char* key, const std::string& value) {
            if (!value.empty())
                options.overrides.push_back(fmt::format("{}={}", key, builders::quoted(value)));
        };
        set("output.out", out);
        set("checkpoint.load", *validate ? "" : resume);
        if (*validate && !resume.empty()) options.taken = RunFolder::Taken::enter;
        set("checkpoint.pretrained_checkpoint", weights);
        set("data.routing_path", options.routing);
        set("output.record_routing", record_routing);
        set("output.export_format", export_format);
        for (std::string& recipe : recipes) CLI::detail::trim(recipe);
        if (!recipes.empty())
            options.overrides.push_back("profile.profile_recipes=" +
                                        builders::yaml_list(recipes, builders::quoted));
        if (steps > 0) options.measured_steps = steps;
        if (ablate) options.ablation = validate::Ablation::flow_switches;
        if (schedules) options.ablation = validate::Ablation::schedules;
        if (state_dtypes) options.ablation = validate::Ablation::state_dtypes;
        if (tensor_stats) options.overrides.push_back("output.tensor_stats=true");
        if (overwrite) options.taken = RunFolder::Taken::overwrite;
        if (take_over) options.holder = FolderLock::Holder::is_replaced;
        if (force) options.where_short = predict::WhereShort::warn;
        using report::Terminal;
        options.terminal = {quiet     ? Terminal::Detail::quiet
                            : verbose ? Terminal::Detail::verbose
                                      : Terminal::Detail::normal};
        options.backend = parse_backend(backend);
        options.placement = job_start().placement;
        options.command = typed(argc, argv);
        static_cast<CommonOptions&>(bench_options) = options;
        static_cast<RunOptions&>(plan_options) = options;
        static_cast<RunOptions&>(replay_options) = options;
        static_cast<RunOptions&>(evaluate_options) = options;
        static_cast<RunOptions&>(generate_options) = options;
        plan_options.clock = mhz * 1e6;
        plan_options.network = network * 1e9;
        if (!json.empty()) plan_options.json = json;
    }
};

// What a run does with a signal; others end at once.
OnStopSignal on_stop_signal(const CommandLine& line) {
    return (*line.train && line.options.dump_samples == 0) || *line.validate ? OnStopSignal::note
                                                                             : OnStopSignal::end;
}

int run(const CommandLine& line) {
    if (line.help_config) {
        fmt::print("{}", fp8flow::help_config());
        return 0;
    }
    if (*line.families) {
        fmt::print("{}", families_page(line.families_markdown));
        return 0;
    }
    if (*line.train)
        return on_ranks(line.options, line.options.dump_samples > 0 ? run_dump_samples : run_train);
    if (*line.validate) return on_ranks(line.options, line.options.joined.empty() ? run_validate : run_join);
    if (*line.profile && !line.compared.empty())
        return run_compare(line.compared[0], line.compared[1], line.options.command, line.out);
    if (*line.profile) return on_ranks(line.options, run_profile);
    if (*line.evaluate) return on_ranks(line.evaluate_options, run_evaluate);
    if (*line.generate) return on_ranks(line.generate_options, run_generate);
    if (*line.replay) return on_ranks(line.replay_options, run_replay);
    if (*line.bench && line.list) {
        fp8flow::print_bench_list();
        return 0;
    }
    if (*line.bench) return on_ranks(line.bench_options, run_bench);
    if (*line.plan) return run_plan(line.plan_options);
    if (*line.doctor) return run_doctor(line.out.empty() ? "runs" : line.out);
    fmt::print("{}", line.app.help());
    return static_cast<int>(ExitCode::usage);
}

// Returns the exit code. Throws what has not been reported.
int run(int argc, char** argv) {
    const Watchdog watchdog(watched_job(), kStartDeadline);
    CommandLine line;
    try {
        line.parse(argc, argv);
        Watchdog::set_deadline(line.start_deadline, "--start-deadline");
    } catch (const CLI::Success& asked) {  // --help, --version
        std::ostringstream text;
        const int code = line.app.exit(asked, text, text);
        fmt::print("{}", text.str());
        return code;
    } catch (const CLI::ParseError& wrong) {
        const std::string command = line.meant_by(argc > 1 ? argv[1] : "");
        return report_usage(std::make_exception_ptr(Error(
            ExitCode::usage, command.empty()
                                 ? fmt::format("{}; see fp8flow --help", wrong.what())
                                 : fmt::format("unknown command '{}'; did you mean '{}'? See fp8flow --help",
                                               printable(argv[1]), command))));
    } catch (const Error&) {
        return report_usage(std::current_exception());
    }
    decide_on_stop_signals(on_stop_signal(line));
    return run(line);
}

}  // namespace

int main(int argc, char** argv) {
    hold_stop_signals();
    keep_descriptors();
    wait_passively(argv);
    std::signal(SIGXFSZ, SIG_IGN);  // past a file size limit, write() then says so (EFBIG)
    std::signal(SIGPIPE, SIG_IGN);  // as where the reader of a pipe has gone (EPIPE)
    try {
        const int code = run(argc, argv);
        // Where it has failed before, the command knows.
        if (std::ferror(stdout) == 0 && std::fflush(stdout) != 0)
            throw std::system_error(errno, std::generic_category());
        return code;
    } catch (...) {
        return report_here(std::current_exception());
    }
}
