// A std::vector whose functions belong to the instruction set that they are compiled for.
#pragma once

#include <concepts>
#include <memory>
#include <vector>

#include "../config.hpp"

TESSERA_NAMESPACE_BEGIN

/// std::allocator under a name of this namespace.
template <class T>
struct host_allocator : std::allocator<T> {
  host_allocator() = default;
  template <class U>
  host_allocator(const host_allocator<U>&) noexcept {}
  template <class U>
  struct rebind {
    using other = host_allocator<U>;
  };
};

/// The library's std::vector<T>. Converts from and to std::vector by copying.
///
/// The functions of a std::vector<int> have one name in the whole program, and the linker keeps one of them: that of a
/// unit built with -mavx2 may be the one that a baseline unit calls. The allocator gives these a name of their own.
template <class T>
class host_vector : public std::vector<T, host_allocator<T>> {
  using base = std::vector<T, host_allocator<T>>;

 public:
  using base::base;
  host_vector() = default;
  template <class U>
  requires std::convertible_to<const U&, T>
  host_vector(const std::vector<U>& other) : base(other.begin(), other.end()) {}
  template <class U>
  requires std::convertible_to<const T&, U> operator std::vector<U>() const {
    return std::vector<U>(this->begin(), this->end());
  }

  friend bool operator==(const host_vector& a, const host_vector& b) {
    return static_cast<const base&>(a) == static_cast<const base&>(b);
  }
  friend bool operator==(const host_vector& a, const std::vector<T>& b) { return a == host_vector(b); }
};

TESSERA_NAMESPACE_END
