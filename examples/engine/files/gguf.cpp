#include "gguf.hpp"

#include <sys/mman.h>

#include <bit>
#include <cerrno>
#include <cstring>
#include <limits>
#include <system_error>
#include <tessera/core/error.hpp>

#include "gguf_blocks.hpp"
#include "input_file.hpp"

namespace engine {
namespace {

using tessera::fail;
using tessera::require;

static_assert(std::endian::native == std::endian::little, "tessera: GGUF bytes are read in place, low byte first");

constexpr std::string_view cure = "download the file again";
constexpr std::int64_t most_values = 1 << 16, most_tensors = 1 << 20, most_axes = 4,
                       longest_axis = std::int64_t(1) << 40;

// What the file writes in front of a value.
enum class kind : std::uint32_t { u8, i8, u16, i16, u32, i32, f32, boolean, text, array, u64, i64, f64 };

/// Reads numbers and texts one behind the other, and never beyond the end.
class reader {
 public:
  explicit reader(std::span<const std::byte> bytes) : bytes_(bytes) {}

  std::size_t position() const { return position_; }
  std::size_t left() const { return bytes_.size() - position_; }

  template <class T>
  T number(std::string_view what) {
    T value;
    std::memcpy(&value, take(sizeof(T), what).data(), sizeof(T));
    return value;
  }
  std::string text(std::string_view what) {
    const auto length = number<std::uint64_t>(what);
    if (length > left()) cut_short(what, length);
    const auto own = take(std::size_t(length), what);
    return std::string(reinterpret_cast<const char*>(own.data()), own.size());
  }
  /// A count of things that take at least `bytes` each.
  std::size_t count(std::string_view what, std::size_t bytes, std::int64_t most) {
    const auto given = number<std::uint64_t>(what);
    if (given > std::uint64_t(most) || given > left() / bytes)
      fail("gguf: " + std::string(what), given, "at most what the file has room for", cure);
    return std::size_t(given);
  }

 private:
  [[noreturn]] void cut_short(std::string_view what, std::uint64_t wanted) const {
    fail("gguf: " + std::string(what), std::to_string(wanted) + " bytes at byte " + std::to_string(position_),
         "at most the rest of the file, which is " + std::to_string(left()), cure);
  }
  std::span<const std::byte> take(std::size_t count, std::string_view what) {
    if (count > left()) cut_short(what, count);
    const auto own = bytes_.subspan(position_, count);
    position_ += count;
    return own;
  }

  std::span<const std::byte> bytes_;
  std::size_t position_ = 0;
};

bool is_whole(kind type) { return type <= kind::i32 || type == kind::u64 || type == kind::i64; }
bool is_number(kind type) { return type == kind::f32 || type == kind::f64; }

kind read_kind(reader& from, const std::string& key) {
  const auto given = from.number<std::uint32_t>("type of a value");
  if (given > std::uint32_t(kind::f64))
    fail("gguf: type of \"" + printable(key) + "\"", given, "0 to 12", "use a file of version 2 or 3");
  return kind(given);
}

std::int64_t read_whole(reader& from, kind type, const std::string& key) {
  constexpr std::string_view what = "a number";
  switch (type) {
    case kind::u8:
      return from.number<std::uint8_t>(what);
    case kind::i8:
      return from.number<std::int8_t>(what);
    case kind::u16:
      return from.number<std::uint16_t>(what);
    case kind::i16:
      return from.number<std::int16_t>(what);
    case kind::u32:
      return from.number<std::uint32_t>(what);
    case kind::i32:
      return from.number<std::int32_t>(what);
    case kind::i64:
      return from.number<std::int64_t>(what);
    default:
      break;
  }
  const auto value = from.number<std::uint64_t>(what);
  if (value > std::uint64_t(std::numeric_limits<std::int64_t>::max()))
    fail("gguf: \"" + printable(key) + "\"", value, "a number below 2^63", cure);
  return std::int64_t(value);
}
double read_number(reader& from, kind type) {
  return type == kind::f32 ? double(from.number<float>("a number")) : from.number<double>("a number");
}

gguf_value read_value(reader& from, const std::string& key) {
  const kind type = read_kind(from, key);
  if (is_whole(type)) return read_whole(from, type, key);
  if (is_number(type)) return read_number(from, type);
  if (type == kind::boolean) return from.number<std::uint8_t>("a flag") != 0;
  if (type == kind::text) return from.text("length of a text");
  const kind items = read_kind(from, key);
  require(items != kind::array, "gguf: items of \"" + printable(key) + "\"", "arrays", "texts or numbers",
          "use a file that llama.cpp reads");
  const std::size_t count = from.count("length of an array", items == kind::text ? 8 : 1, std::int64_t(1) << 32);
  std::vector<std::string> texts;
  std::vector<std::int64_t> wholes;
  std::vector<double> numbers;
  for (std::size_t i = 0; i < count; ++i) {
    if (items == kind::text)
      texts.push_back(from.text("length of a text"));
    else if (is_number(items))
      numbers.push_back(read_number(from, items));
    else
      wholes.push_back(items == kind::boolean ? from.number<std::uint8_t>("a flag") : read_whole(from, items, key));
  }
  if (items == kind::text) return texts;
  if (is_number(items)) return numbers;
  return wholes;
}

/// A tensor's row in the table; its bytes come later.
struct tensor_row {
  std::string name;
  gguf_tensor tensor;
  std::uint64_t offset = 0, bytes = 0;
};

tensor_row read_tensor_row(reader& from) {
  tensor_row row;
  row.name = from.text("length of a tensor's name");
  const std::string field = "gguf: tensor \"" + printable(row.name) + "\": ";
  const auto axes = from.number<std::uint32_t>("number of axes");
  if (axes < 1 || axes > most_axes) fail(field + "axes", axes, "1 to 4", cure);
  std::int64_t elements = 1;
  for (std::uint32_t axis = 0; axis < axes; ++axis) {
    const auto length = from.number<std::uint64_t>("length of an axis");
    if (length < 1 || length > std::uint64_t(longest_axis) || std::int64_t(length) > longest_axis / elements)
      fail(field + "length of axis " + std::to_string(axis), length, "at least 1, and fewer than 2^40 elements in all",
           cure);
    elements *= std::int64_t(length);
    row.tensor.shape.insert(row.tensor.shape.begin(), std::int64_t(length));  // the file has the fastest axis first
  }
  const auto type = from.number<std::uint32_t>("type of a tensor");
  row.tensor.encoding = find_gguf_encoding(type);
  if (!row.tensor.encoding)
    fail(field + "type", type,
         "F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1 or Q2_K to Q6_K, which are 0 to 3, 6 to 8, "
         "10 to 14 and 30",
         "convert the file to one of them");
  const std::int64_t fastest = row.tensor.shape.back(), block = row.tensor.encoding->block_elements;
  if (fastest % block != 0) fail(field + "elements of a row", fastest, "a multiple of " + std::to_string(block), cure);
  row.bytes = std::uint64_t(elements / block) * std::uint64_t(row.tensor.encoding->block_bytes);
  row.offset = from.number<std::uint64_t>("offset of a tensor");
  return row;
}

template <class T>
const T& value_as(const gguf_file& file, std::string_view key, std::string_view wanted) {
  const gguf_value* found = file.value(key);
  require(found != nullptr, "gguf: \"" + std::string(key) + "\"", "missing", wanted, "use a complete file");
  const T* value = std::get_if<T>(found);
  require(value != nullptr, "gguf: \"" + std::string(key) + "\"", "a value of another kind", wanted,
          "use a complete file");
  return *value;
}

}  // namespace

gguf_file gguf_file::parse(std::span<const std::byte> bytes) {
  gguf_file file;
  reader from(bytes);
  const auto magic = from.number<std::uint32_t>("the first four bytes");
  require(magic == 0x46554747, "gguf: the first four bytes", magic, "GGUF", "pass a GGUF file");
  const auto version = from.number<std::uint32_t>("version");
  require(version == 2 || version == 3, "gguf: version", version, "2 or 3", "convert the file anew");
  const std::size_t tensors = from.count("number of tensors", 24, most_tensors);
  const std::size_t values = from.count("number of values", 12, most_values);
  for (std::size_t i = 0; i < values; ++i) {
    std::string key = from.text("length of a key");
    gguf_value value = read_value(from, key);
    if (!file.values_.emplace(key, std::move(value)).second)
      fail("gguf: key \"" + printable(key) + "\"", "given twice", "given once", cure);
  }
  std::vector<tensor_row> rows;
  for (std::size_t i = 0; i < tensors; ++i) rows.push_back(read_tensor_row(from));
  std::int64_t alignment = 32;
  if (file.value("general.alignment")) alignment = file.count("general.alignment");
  if (alignment < 1 || alignment > 1 << 20) fail("gguf: \"general.alignment\"", alignment, "1 to 2^20", cure);
  const std::size_t begin =
      (from.position() + std::size_t(alignment) - 1) / std::size_t(alignment) * std::size_t(alignment);
  for (tensor_row& row : rows) {
    const bool inside =
        begin <= bytes.size() && row.offset <= bytes.size() - begin && row.bytes <= bytes.size() - begin - row.offset;
    if (!inside)
      fail("gguf: tensor \"" + printable(row.name) + "\": its bytes",
           std::to_string(row.bytes) + " from " + std::to_string(row.offset), "inside the file", cure);
    row.tensor.bytes = bytes.subspan(begin + std::size_t(row.offset), std::size_t(row.bytes));
    if (!file.tensors_.emplace(row.name, std::move(row.tensor)).second)
      fail("gguf: tensor \"" + printable(row.name) + "\"", "given twice", "given once", cure);
  }
  return file;
}

gguf_file gguf_file::open(const std::filesystem::path& path) {
  const input_file input(path, "a GGUF file");
  require(input.size() > 0, input.name(), "empty", "a GGUF file", "download it again");
  void* mapped = mmap(nullptr, input.size(), PROT_READ, MAP_PRIVATE, input.descriptor(), 0);
  if (mapped == MAP_FAILED)
    fail(input.name(), std::generic_category().message(errno), "a file that can be mapped", "copy it to a local disk");
  const std::shared_ptr<const std::byte> mapping(
      static_cast<const std::byte*>(mapped),
      [size = input.size()](const std::byte* begin) { munmap(const_cast<std::byte*>(begin), size); });
  try {
    gguf_file file = parse({mapping.get(), input.size()});
    file.mapping_ = mapping;
    return file;
  } catch (const tessera::error& problem) {
    throw tessera::error(input.name() + ": " + problem.what());
  }
}

const gguf_tensor* gguf_file::find(std::string_view name) const {
  const auto found = tensors_.find(name);
  return found == tensors_.end() ? nullptr : &found->second;
}

std::vector<float> gguf_file::to_fp32(std::string_view name) const {
  const gguf_tensor* tensor = find(name);
  require(tensor != nullptr, "gguf: tensor \"" + std::string(name) + "\"", "missing", "a tensor of the file",
          "use a complete file");
  const gguf_encoding& encoding = *tensor->encoding;
  const std::size_t blocks = tensor->bytes.size() / std::size_t(encoding.block_bytes);
  std::vector<float> values(blocks * std::size_t(encoding.block_elements));
  for (std::size_t block = 0; block < blocks; ++block)
    encoding.decode(tensor->bytes.data() + block * std::size_t(encoding.block_bytes),
                    values.data() + block * std::size_t(encoding.block_elements));
  return values;
}

const gguf_value* gguf_file::value(std::string_view key) const {
  const auto found = values_.find(key);
  return found == values_.end() ? nullptr : &found->second;
}
std::int64_t gguf_file::count(std::string_view key) const {
  return value_as<std::int64_t>(*this, key, "a whole number");
}
double gguf_file::number(std::string_view key) const { return value_as<double>(*this, key, "a number"); }
const std::string& gguf_file::text(std::string_view key) const { return value_as<std::string>(*this, key, "a text"); }
const std::vector<std::string>& gguf_file::texts(std::string_view key) const {
  return value_as<std::vector<std::string>>(*this, key, "a list of texts");
}

bool is_gguf(const std::filesystem::path& path) { return path.extension() == ".gguf"; }

}  // namespace engine
