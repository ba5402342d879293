// expect: tessera: query heads of a group choose apart by a window of queries, under a budget that compares no heads; take the scope per_head
#include <tessera/budget/uniform.hpp>
#include <tessera/scope/per_head_or_query.hpp>
#include <tessera/scorer/position.hpp>
#include <tessera/selector/top_tokens.hpp>
#include <tessera/stages.hpp>

tessera::filter<tessera::position, tessera::uniform, tessera::top_tokens, tessera::per_head_or_query> chosen;
