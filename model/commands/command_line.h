// SPDX-License-Identifier: MIT
// The command line: which command is meant, and its options.
#pragma once

#include "model/commands/commands.h"
#include "model/job/launcher.h"

#include <CLI/CLI.hpp>

#include <string>
#include <vector>

namespace fp8flow {

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

    Options options;
    std::string out;                    // --out
    std::vector<std::string> compared;  // profile --compare: OLD NEW
    double start_deadline = 300;        // seconds
    bool help_config = false, families_markdown = false, list = false;

    CommandLine();
    // Throws CLI::ParseError and Error.
    void parse(int argc, char** argv, const JobStart& job);
    // The command that a misspelt word may mean; empty if there is none.
    std::string meant_by(const std::string& word) const;

private:
    CLI::Option* add_key(CLI::App* command, const char* name, const char* key, const char* meaning);
    void add_backend(CLI::App* command);
    void add_configuration_options();
    void add_run_options();
    void add_train_options();
    void add_validate_options();
    void add_profile_options();
    void add_trained_options();
    void add_generate_options();
    void add_replay_options();
    void add_plan_options();
    void add_bench_options();
    void complete_trained_options();

    std::vector<std::string> keys_;     // section.key=value of options that set a key
    std::vector<std::string> recipes_;  // --recipes
};

}  // namespace fp8flow
