// Writing a result to wherever a person points: a file as a whole or not at all, a device or a FIFO as a stream.
#pragma once

#include <cstddef>
#include <filesystem>
#include <span>
#include <string>

namespace engine {

/// Throws tessera::error unless a result can be written there: the folder is missing, the path is a folder, the file has
/// no write permission. Leaves nothing behind.
void require_writable(const std::filesystem::path& path);

/// Writes the parts one after the other.
///
/// A regular file, or what a symbolic link points to, is replaced by a temporary file beside it: there is the old file or
/// the whole new one. Where the folder allows no other file, or the file cannot be replaced (a container's mount), it is
/// written in place. A character device or FIFO is written to; a FIFO has to get a reader within ten seconds.
/// Errors: as `require_writable`; no room, no reader; tessera::error.
void write_file(const std::filesystem::path& path, std::span<const std::span<const std::byte>> parts);
void write_file(const std::filesystem::path& path, const std::string& content);

/// Removes the temporary file that is being written. For signal handlers: calls nothing that they may not call.
void remove_unfinished_output() noexcept;

}  // namespace engine
