#include "safetensors.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <nlohmann/json.hpp>
#include <optional>
#include <system_error>
#include <tessera/core/error.hpp>
#include <tessera/core/types.hpp>
#include <utility>

#include "input_file.hpp"
#include "output_file.hpp"

namespace engine {
namespace {

using nlohmann::json;
using tessera::fail;

static_assert(std::endian::native == std::endian::little,
              "tessera: safetensors bytes are read in place, low byte first");

constexpr std::uint64_t longest_header = 100'000'000;  // the limit of the format's own reader
constexpr std::string_view metadata_key = "__metadata__";
constexpr std::string_view cure_file = "check that the file was written completely by a safetensors writer";

struct dtype_row {
  dtype type;
  std::string_view name;
  std::size_t bytes;
};
constexpr dtype_row dtype_rows[] = {{dtype::f32, "F32", 4}, {dtype::f16, "F16", 2}, {dtype::bf16, "BF16", 2},
                                    {dtype::i32, "I32", 4}, {dtype::i64, "I64", 8}, {dtype::u8, "U8", 1}};

const dtype_row& row_of(dtype type) { return dtype_rows[std::size_t(type)]; }

std::string shape_text(std::span<const std::int64_t> shape) {
  std::string text = "[";
  for (std::size_t axis = 0; axis < shape.size(); ++axis) {
    if (axis > 0) text += ", ";
    text += shape[axis] == any_size ? "any" : std::to_string(shape[axis]);
  }
  return text + "]";
}

// Names come from the file: they may be as long as the header and hold anything.
std::string tensor_field(std::string_view name, std::string_view field) {
  return "safetensors: tensor \"" + printable(name) + "\": " + std::string(field);
}

dtype parse_dtype(std::string_view name, std::string_view text) {
  for (const auto& row : dtype_rows)
    if (row.name == text) return row.type;
  fail(tensor_field(name, "dtype"), printable(text), "F32, F16, BF16, I32, I64 or U8", "convert the tensor");
}

// The bytes that `shape` takes, or -1 when that exceeds 63 bits. A zero anywhere makes it 0.
std::int64_t shape_bytes(std::span<const std::int64_t> shape, std::size_t element_bytes) {
  if (std::find(shape.begin(), shape.end(), 0) != shape.end()) return 0;
  std::int64_t total = std::int64_t(element_bytes);
  for (const auto size : shape) {
    if (size > INT64_MAX / total) return -1;
    total *= size;
  }
  return total;
}

using tensor_map = std::map<std::string, tensor_view, std::less<>>;
using metadata_map = std::map<std::string, std::string, std::less<>>;

// Takes tensors as the header's text passes by: a tree of it takes three times as long, and forgets names that come twice.
class header_reader final : public nlohmann::json_sax<json> {
 public:
  header_reader(std::span<const std::byte> data, tensor_map& tensors, metadata_map& metadata)
      : data_(data), tensors_(tensors), metadata_(metadata) {}

  bool null() override { return value("null", "null"); }
  bool boolean(bool) override { return value("boolean", "boolean"); }
  bool number_integer(number_integer_t number) override { return value("number", std::to_string(number)); }
  bool number_float(number_float_t, const string_t& text) override { return value("number", text); }
  bool binary(binary_t&) override { return value("binary", "binary"); }
  bool number_unsigned(number_unsigned_t number) override {
    if (!sizes_ || depth_ != 3 || number > number_unsigned_t(INT64_MAX)) return value("number", std::to_string(number));
    sizes_->push_back(std::int64_t(number));
    return true;
  }
  bool string(string_t& text) override {
    value("string", "string");
    if (depth_ == 2 && in_metadata_) metadata_.insert_or_assign(field_, std::move(text));
    if (depth_ == 2 && !in_metadata_ && field_ == "dtype") dtype_ = std::move(text);
    return true;
  }

  bool start_object(std::size_t) override { return value("object", "object") && ++depth_ > 0; }
  bool end_object() override {
    if (--depth_ == 1 && !in_metadata_) add_tensor();
    return true;
  }
  bool start_array(std::size_t) override {
    value("array", "array");
    if (++depth_ == 3 && !in_metadata_) {
      if (field_ == "shape") sizes_ = &shape_.emplace();
      if (field_ == "data_offsets") sizes_ = &offsets_.emplace();
    }
    return true;
  }
  bool end_array() override {
    if (--depth_ == 2) sizes_ = nullptr;
    return true;
  }
  bool key(string_t& name) override {
    if (depth_ == 2) field_ = std::move(name);
    if (depth_ != 1) return true;
    in_metadata_ = name == metadata_key;
    if (in_metadata_ && std::exchange(has_metadata_, true)) fail_twice(name);
    name_ = std::move(name);
    dtype_ = "missing";
    shape_.reset();
    offsets_.reset();
    return true;
  }
  bool parse_error(std::size_t, const std::string&, const nlohmann::detail::exception& problem) override {
    fail("safetensors: header", printable(problem.what()), "a JSON object", cure_file);
  }

 private:
  // A value of any kind begins where a rule may want another kind.
  bool value(std::string_view type, const std::string& text) const {
    if (depth_ == 0 && type != "object") fail("safetensors: header", std::string(type), "a JSON object", cure_file);
    if (depth_ == 1 && type != "object")
      fail(in_metadata_ ? "safetensors: __metadata__" : tensor_field(name_, "entry"), std::string(type),
           "a JSON object", cure_file);
    if (depth_ == 2 && in_metadata_ && type != "string")
      fail("safetensors: metadata \"" + printable(field_) + "\"", std::string(type), "a string", cure_file);
    const bool is_sizes = !in_metadata_ && (field_ == "shape" || field_ == "data_offsets");
    if (depth_ == 2 && is_sizes && type != "array") fail_no_list(field_);
    if (depth_ == 3 && sizes_) fail(tensor_field(name_, field_), printable(text), "integers in [0, 2^63)", cure_file);
    return true;
  }

  void add_tensor() {
    tensor_view tensor{parse_dtype(name_, dtype_), {}, {}};
    if (!shape_) fail_no_list("shape");
    if (!offsets_) fail_no_list("data_offsets");
    tensor.shape = std::move(*shape_);
    const auto& offsets = *offsets_;
    const bool in_range = offsets.size() == 2 && offsets[0] <= offsets[1] && std::uint64_t(offsets[1]) <= data_.size();
    if (!in_range)
      fail(tensor_field(name_, "data_offsets"), printable(shape_text(offsets)),
           "[begin, end] within the " + std::to_string(data_.size()) + " bytes of data", cure_file);
    const std::int64_t needed = shape_bytes(tensor.shape, dtype_bytes(tensor.type));
    if (needed != offsets[1] - offsets[0])
      fail(tensor_field(name_, "size"), std::to_string(offsets[1] - offsets[0]) + " bytes",
           needed < 0 ? "a shape that fits 63 bits" : std::to_string(needed) + " bytes for its shape and dtype",
           cure_file);
    tensor.bytes = data_.subspan(std::size_t(offsets[0]), std::size_t(needed));
    const std::size_t before = tensors_.size();
    const auto added = tensors_.emplace_hint(tensors_.end(), std::move(name_), std::move(tensor));
    if (tensors_.size() == before) fail_twice(added->first);
  }

  [[noreturn]] void fail_no_list(std::string_view field) const {
    fail(tensor_field(name_, field), "no list", "a list of integers >= 0", cure_file);
  }
  [[noreturn]] static void fail_twice(std::string_view name) {
    fail("safetensors: a tensor name", "\"" + printable(name) + "\" twice", "unique names", cure_file);
  }

  std::span<const std::byte> data_;
  tensor_map& tensors_;
  metadata_map& metadata_;
  int depth_ = 0;  // objects and lists that are open
  bool in_metadata_ = false, has_metadata_ = false;
  std::string name_, field_, dtype_;
  std::optional<std::vector<std::int64_t>> shape_, offsets_;
  std::vector<std::int64_t>* sizes_ = nullptr;  // the list that is open
};

// The format lets tensors neither overlap nor leave bytes between or after them.
void require_partition(const tensor_map& tensors, std::span<const std::byte> data) {
  std::vector<std::pair<const std::byte*, const std::byte*>> ranges;
  for (const auto& [name, tensor] : tensors) {
    const std::byte* first = tensor.bytes.data();
    if (!tensor.bytes.empty()) ranges.emplace_back(first, first + tensor.bytes.size());
  }
  std::sort(ranges.begin(), ranges.end());
  const std::byte* end = data.data();
  for (const auto& [first, last] : ranges) {
    if (first != end)
      fail("safetensors: data", first < end ? "shared by two tensors" : "unclaimed between two tensors",
           "tensors one after the other", cure_file);
    end = last;
  }
  const auto left = data.size() - std::size_t(end - data.data());
  tessera::require(left == 0, "safetensors: bytes after the last tensor", left, "0", cure_file);
}

const tensor_view& tensor_of_shape(const safetensors_file& file, std::string_view name,
                                   std::span<const std::int64_t> shape) {
  const tensor_view& tensor = file.at(name);
  const auto agrees = [](std::int64_t got, std::int64_t wanted) { return wanted == any_size || got == wanted; };
  const bool equal = std::equal(tensor.shape.begin(), tensor.shape.end(), shape.begin(), shape.end(), agrees);
  tessera::require(equal, tensor_field(name, "shape"), shape_text(tensor.shape), shape_text(shape),
                   "store it with that shape, slowest axis first");
  return tensor;
}

// Bytes of a file have no alignment, so every element is copied out.
template <class Stored, class Wanted>
void convert(std::span<const std::byte> bytes, std::vector<Wanted>& values) {
  if (bytes.empty()) return;
  for (std::size_t i = 0; i < values.size(); ++i) {
    Stored stored;
    std::memcpy(&stored, bytes.data() + i * sizeof(Stored), sizeof(Stored));
    values[i] = Wanted(stored);
  }
}

}  // namespace

std::string_view dtype_name(dtype type) { return row_of(type).name; }
std::size_t dtype_bytes(dtype type) { return row_of(type).bytes; }

safetensors_file safetensors_file::parse(std::span<const std::byte> bytes) {
  std::uint64_t header_size = 0;
  tessera::require(bytes.size() >= sizeof header_size, "safetensors: file size", bytes.size(), "at least 8 bytes",
                   cure_file);
  std::memcpy(&header_size, bytes.data(), sizeof header_size);
  const auto body = bytes.subspan(sizeof header_size);
  tessera::require(header_size <= std::min<std::uint64_t>(body.size(), longest_header), "safetensors: header length",
                   header_size, "at most " + std::to_string(std::min<std::uint64_t>(body.size(), longest_header)),
                   cure_file);
  const auto data = body.subspan(std::size_t(header_size));
  const char* text = reinterpret_cast<const char*>(body.data());

  safetensors_file file;
  header_reader reader(data, file.tensors_, file.metadata_);
  json::sax_parse(text, text + header_size, &reader);
  require_partition(file.tensors_, data);
  return file;
}

safetensors_file safetensors_file::open(const std::filesystem::path& path) {
  const input_file file(path, "a safetensors file");
  const std::size_t size = file.size();
  if (size == 0) fail(file.name(), "empty", "a safetensors file", "write or download it again");

  void* address = ::mmap(nullptr, size, PROT_READ, MAP_PRIVATE, file.descriptor(), 0);
  if (address == MAP_FAILED)
    fail(file.name(), "not mapped (" + std::generic_category().message(errno) + ")", "a file that can be mapped",
         "copy it to a local disk, or raise the limit of memory");
  const std::shared_ptr<const std::byte> mapping(static_cast<const std::byte*>(address),
                                                 [address, size](const std::byte*) { ::munmap(address, size); });
  try {
    safetensors_file opened = parse({mapping.get(), size});
    opened.mapping_ = mapping;
    return opened;
  } catch (const tessera::error& problem) {
    throw tessera::error(file.name() + ": " + problem.what());
  }
}

const tensor_view& safetensors_file::at(std::string_view name) const {
  const auto found = tensors_.find(name);
  if (found == tensors_.end()) {
    std::string names;
    for (const auto& [other, tensor] : tensors_) names += (names.empty() ? "" : ", ") + other;
    fail("safetensors: tensor \"" + printable(name) + "\"", "missing",
         names.empty() ? "a file that has tensors" : "one of: " + printable(names), "store it under that name");
  }
  return found->second;
}

std::vector<float> safetensors_file::to_fp32(std::string_view name, std::span<const std::int64_t> shape) const {
  const tensor_view& tensor = tensor_of_shape(*this, name, shape);
  std::vector<float> values(std::size_t(tensor.element_count()));
  switch (tensor.type) {
    case dtype::f32:
      convert<float>(tensor.bytes, values);
      break;
    case dtype::f16:
      convert<tessera::fp16>(tensor.bytes, values);
      break;
    case dtype::bf16:
      convert<tessera::bf16>(tensor.bytes, values);
      break;
    default:
      fail(tensor_field(name, "dtype"), dtype_name(tensor.type), "F32, F16 or BF16", "convert the tensor");
  }
  return values;
}

std::vector<std::int64_t> safetensors_file::to_int64(std::string_view name, std::span<const std::int64_t> shape) const {
  const tensor_view& tensor = tensor_of_shape(*this, name, shape);
  std::vector<std::int64_t> values(std::size_t(tensor.element_count()));
  switch (tensor.type) {
    case dtype::i32:
      convert<std::int32_t>(tensor.bytes, values);
      break;
    case dtype::i64:
      convert<std::int64_t>(tensor.bytes, values);
      break;
    case dtype::u8:
      convert<std::uint8_t>(tensor.bytes, values);
      break;
    default:
      fail(tensor_field(name, "dtype"), dtype_name(tensor.type), "I32, I64 or U8", "convert the tensor");
  }
  return values;
}

void require_finite(std::string_view name, std::span<const float> values) {
  for (std::size_t i = 0; i < values.size(); ++i)
    if (!std::isfinite(values[i]))
      fail("tensor \"" + printable(name) + "\"", std::to_string(values[i]) + " at element " + std::to_string(i),
           "finite values", "find out which step made it overflow");
}

void safetensors_writer::add_bytes(std::string name, dtype type, std::vector<std::int64_t> shape, std::size_t count,
                                   const void* data) {
  tessera::require(name != metadata_key, "safetensors: tensor name", name, "any other name", "rename the tensor");
  const bool sensible = std::all_of(shape.begin(), shape.end(), [](std::int64_t size) { return size >= 0; });
  const std::size_t byte_count = count * dtype_bytes(type);
  const bool fits = sensible && shape_bytes(shape, dtype_bytes(type)) == std::int64_t(byte_count);
  tessera::require(fits, tensor_field(name, "shape"), shape_text(shape),
                   "a shape of " + std::to_string(count) + " elements", "pass the shape of the values");
  tessera::require(!tensors_.contains(name), "safetensors: tensor name", "\"" + name + "\" twice", "unique names",
                   "rename one of them");
  entry added{type, std::move(shape), std::vector<std::byte>(byte_count)};
  if (byte_count > 0) std::memcpy(added.bytes.data(), data, byte_count);
  tensors_.emplace(std::move(name), std::move(added));
}

void safetensors_writer::add(std::string name, std::vector<std::int64_t> shape, std::span<const float> values) {
  add_bytes(std::move(name), dtype::f32, std::move(shape), values.size(), values.data());
}
void safetensors_writer::add(std::string name, std::vector<std::int64_t> shape, std::span<const std::int32_t> values) {
  add_bytes(std::move(name), dtype::i32, std::move(shape), values.size(), values.data());
}
void safetensors_writer::add(std::string name, std::vector<std::int64_t> shape, std::span<const std::int64_t> values) {
  add_bytes(std::move(name), dtype::i64, std::move(shape), values.size(), values.data());
}
void safetensors_writer::add(std::string name, std::vector<std::int64_t> shape, std::span<const std::uint8_t> values) {
  add_bytes(std::move(name), dtype::u8, std::move(shape), values.size(), values.data());
}

void safetensors_writer::add_rounded(std::string name, std::vector<std::int64_t> shape, std::span<const float> values,
                                     dtype type) {
  if (type == dtype::f32) return add(std::move(name), std::move(shape), values);
  if (type == dtype::f16) {
    const std::vector<tessera::fp16> rounded(values.begin(), values.end());
    return add_bytes(std::move(name), type, std::move(shape), rounded.size(), rounded.data());
  }
  tessera::require(type == dtype::bf16, tensor_field(name, "dtype"), dtype_name(type), "F32, F16 or BF16",
                   "add integers as integers");
  const std::vector<tessera::bf16> rounded(values.begin(), values.end());
  add_bytes(std::move(name), type, std::move(shape), rounded.size(), rounded.data());
}

void safetensors_writer::write(const std::filesystem::path& path) const {
  // Wide elements first: with a header padded to 8 bytes, every tensor is then aligned to its element.
  std::vector<std::pair<const std::string, entry> const*> order;
  for (const auto& item : tensors_) order.push_back(&item);
  std::stable_sort(order.begin(), order.end(), [](const auto* a, const auto* b) {
    return dtype_bytes(a->second.type) > dtype_bytes(b->second.type);
  });

  json header = json::object();
  if (!metadata_.empty()) header[std::string(metadata_key)] = metadata_;
  std::size_t offset = 0;
  for (const auto* item : order) {
    const auto& [name, tensor] = *item;
    header[name] = {{"dtype", dtype_name(tensor.type)},
                    {"shape", tensor.shape},
                    {"data_offsets", {offset, offset + tensor.bytes.size()}}};
    offset += tensor.bytes.size();
  }
  std::string text;
  try {
    text = header.dump();
  } catch (const json::exception& problem) {
    fail("safetensors: a name or metadata entry", printable(problem.what()), "UTF-8 text", "re-encode it");
  }
  text.resize((text.size() + 7) / 8 * 8, ' ');
  const std::uint64_t header_size = text.size();

  std::vector<std::span<const std::byte>> parts{std::as_bytes(std::span(&header_size, 1)),
                                                std::as_bytes(std::span(text))};
  for (const auto* item : order) parts.emplace_back(item->second.bytes);
  write_file(path, parts);
}

}  // namespace engine
