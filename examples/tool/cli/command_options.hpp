// The commands of the tool with their options and helps.
#pragma once

#include <CLI/CLI.hpp>

namespace tool {

/// Adds every command. A command that is parsed calls its function.
void add_commands(CLI::App& app);

}  // namespace tool
