// An entry in a family's list of operations: the schema, which includes the name, and the function that
// checks and launches a call.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <string_view>

#include "boxing.h"

namespace h100_diffusers_kernels {

struct Operation {
  const char* schema;
  const char* name;
  void (*call)(StableIValue*, uint64_t, uint64_t);
};

// A string literal as a template argument.
template <size_t kSize>
struct Schema {
  char text[kSize];
  consteval Schema(const char (&literal)[kSize]) { std::copy_n(literal, kSize, text); }
};

template <Schema schema>
constexpr auto kOperationName = [] {
  std::array<char, sizeof(schema.text)> name{};
  for (size_t i = 0; schema.text[i] != '('; ++i) name[i] = schema.text[i];
  return name;
}();

// The name in error texts: the public function's, without the "_out" of an operator that writes to `out`.
template <Schema schema>
constexpr auto kPublicName = [] {
  auto name = kOperationName<schema>;
  const std::string_view text(name.data()), ending = "_out";
  if (text.ends_with(ending)) name[text.size() - ending.size()] = '\0';
  return name;
}();

// `function` takes the public name, for error texts, then the arguments of the schema.
template <Schema schema, auto function>
constexpr Operation operation() {
  return {schema.text, kOperationName<schema>.data(), Boxed<function, kPublicName<schema>>::call};
}

}  // namespace h100_diffusers_kernels
