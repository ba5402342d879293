// expect: tessera: a reader needs copy(source, target), by which fork copies the index of a sequence
#include <tessera/cache.hpp>
#include <tessera/methods/quest.hpp>

using namespace tessera;

struct reader_that_no_fork_can_copy {
  void open(std::size_t) {}
  void clear(std::size_t) {}
  void forget(std::size_t) {}
  offset_t list_bytes(std::size_t, index_t, index_t) const { return 0; }
  offset_t side_bytes() const { return 0; }
  offset_t bytes(std::size_t) const { return 0; }
};

static_assert(cpu::check_reader<reader_that_no_fork_can_copy, int>());
