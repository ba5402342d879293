// An attention whose logits nobody knows: scorers could not weigh what is attended.
// expect: tessera: an attention must hold a logit_rule named rule
#include <tessera/concepts/attention.hpp>

struct ruleless_decode {
  static constexpr const char* name = "ruleless_decode";
  static constexpr bool gathers = false;
};

static_assert(tessera::check_attention<ruleless_decode>());
