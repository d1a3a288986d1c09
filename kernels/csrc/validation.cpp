// SPDX-License-Identifier: Apache-2.0
// The only place that judges operator arguments; both backends and the `check_*` operators call it.
#include "validation.h"

#include <atomic>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <sstream>
#include <string>
#include <unordered_map>

namespace qout {
namespace {

using torch::headeronly::Layout;
using torch::headeronly::ScalarType;

#define REQUIRE(condition, argument, got, needs) \
  STD_TORCH_CHECK(condition, argument, ": got ", got, "; needs ", needs)

std::string list(const torch::headeronly::IntHeaderOnlyArrayRef& values) {
  std::ostringstream text;
  text << '[';
  for (size_t i = 0; i < values.size(); ++i) text << (i ? ", " : "") << values[i];
  text << ']';
  return text.str();
}

std::string shape(const Tensor& tensor) { return "shape " + list(tensor.sizes()); }

std::string strides(const Tensor& tensor) {
  return shape(tensor) + " with strides " + list(tensor.strides());
}

// Raw numbers, because the enumeration of the stable headers lacks most device types.
struct Place {
  int32_t type;
  int32_t index;
  bool operator==(const Place&) const = default;
};

Place place_of(const Tensor& tensor) {
  Place place{};
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(tensor.get(), &place.type));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(tensor.get(), &place.index));
  return place;
}

bool on_cpu(const Place& place) { return place.type == aoti_torch_device_type_cpu(); }
bool on_cuda(const Place& place) { return place.type == aoti_torch_device_type_cuda(); }

std::string device_name(const Place& place) {
  if (on_cpu(place)) return "device cpu";
  const std::string type = on_cuda(place) ? "cuda" : "of torch type " + std::to_string(place.type);
  return "device " + type + (place.index < 0 ? "" : ":" + std::to_string(place.index));
}

struct Named {
  const char* name;
  const Tensor& tensor;
};

void check_placement(const Named& argument, const Tensor& k_cache) {
  REQUIRE(argument.tensor.layout() == Layout::Strided, argument.name, "a tensor that is not strided",
          "a dense strided layout");
  const Place here = place_of(argument.tensor);
  const Place there = place_of(k_cache);
  REQUIRE(here == there, argument.name, device_name(here), "the device of k_cache, " + device_name(there));
}

void check_supported_device(const Tensor& k_cache) {
  const Place place = place_of(k_cache);
  REQUIRE(on_cpu(place) || on_cuda(place), "k_cache", device_name(place),
          "a device with an implementation: cpu or cuda");
}

void check_dtype(const Named& argument, ScalarType wanted) {
  REQUIRE(argument.tensor.scalar_type() == wanted, argument.name,
          "dtype " + std::string(torch::headeronly::toString(argument.tensor.scalar_type())),
          "dtype " + std::string(torch::headeronly::toString(wanted)));
}

void check_contiguous(const Named& argument) {
  REQUIRE(argument.tensor.is_contiguous(), argument.name, strides(argument.tensor),
          "a contiguous tensor");
}

// Last, because a tensor of another layout or device may have no address.
void check_aligned(const Named& argument, uintptr_t bytes) {
  const auto address = reinterpret_cast<uintptr_t>(argument.tensor.const_data_ptr());
  REQUIRE(argument.tensor.numel() == 0 || address % bytes == 0, argument.name,
          "an address " + std::to_string(address % bytes) + " bytes past an alignment boundary",
          "a " + std::to_string(bytes) + "-byte aligned address");
}

void check_query(const Named& q) {
  REQUIRE(q.tensor.dim() == 3, q.name, shape(q.tensor), "3 dimensions [rows, heads, 512]");
  REQUIRE(q.tensor.size(2) == kHeadDim, q.name, shape(q.tensor), "a last dimension of 512");
  REQUIRE(q.tensor.size(1) >= 1 && q.tensor.size(1) <= kMaxHeads, q.name, shape(q.tensor),
          "1 to 128 heads");
  check_dtype(q, ScalarType::BFloat16);
  check_contiguous(q);
}

void check_output(const Tensor& q_out, const Tensor& q_in) {
  REQUIRE(q_out.dim() == 3, "q_out", shape(q_out), "3 dimensions [rows, padded heads, 512]");
  REQUIRE(q_out.size(2) == kHeadDim, "q_out", shape(q_out), "a last dimension of 512");
  REQUIRE(q_out.size(0) >= q_in.size(0), "q_out", shape(q_out),
          "at least the " + std::to_string(q_in.size(0)) + " rows of q_in");
  REQUIRE(q_out.size(1) >= q_in.size(1), "q_out", shape(q_out),
          "at least the " + std::to_string(q_in.size(1)) + " heads of q_in");
  const int64_t heads = q_out.size(1);
  REQUIRE(heads == 8 || heads == 16 || heads == 32 || heads == 64 || heads == 128, "q_out",
          shape(q_out), "8, 16, 32, 64 or 128 padded heads");
  check_dtype({"q_out", q_out}, ScalarType::BFloat16);
  check_contiguous({"q_out", q_out});
}

void check_context(const Tensor& kv) {
  REQUIRE(kv.dim() == 2, "kv", shape(kv), "2 dimensions [rows, 512]");
  REQUIRE(kv.size(1) == kHeadDim, "kv", shape(kv), "a last dimension of 512");
  check_dtype({"kv", kv}, ScalarType::BFloat16);
  check_contiguous({"kv", kv});
}

void check_cache(const Tensor& k_cache, int64_t block_size, int64_t inserts) {
  REQUIRE(block_size > 0 && block_size % 32 == 0, "cache_block_size", block_size,
          "a positive multiple of 32");
  check_dtype({"k_cache", k_cache}, ScalarType::Byte);
  REQUIRE(k_cache.dim() == 2, "k_cache", shape(k_cache), "2 dimensions [blocks, cache_block_size * 584]");
  const int64_t width = k_cache.size(1);
  REQUIRE(width % kTokenBytes == 0 && width / kTokenBytes == block_size, "k_cache", shape(k_cache),
          "rows of cache_block_size * 584 bytes with cache_block_size " + std::to_string(block_size));
  REQUIRE(k_cache.stride(1) == 1, "k_cache", strides(k_cache), "a stride of 1 inside a block");
  REQUIRE(k_cache.stride(0) >= width && k_cache.stride(0) % 16 == 0, "k_cache", strides(k_cache),
          "a block stride of at least " + std::to_string(width) + " bytes, in multiples of 16");
  REQUIRE(k_cache.size(0) > 0 || inserts == 0, "k_cache", shape(k_cache),
          "at least 1 block for " + std::to_string(inserts) + " slots");
}

void check_indices(const Tensor& slot_mapping, const Tensor& position_ids, int64_t rows) {
  REQUIRE(slot_mapping.dim() == 1, "slot_mapping", shape(slot_mapping), "1 dimension");
  check_dtype({"slot_mapping", slot_mapping}, ScalarType::Long);
  check_contiguous({"slot_mapping", slot_mapping});
  REQUIRE(slot_mapping.size(0) <= rows, "slot_mapping", shape(slot_mapping),
          "at most the " + std::to_string(rows) + " rows of kv");
  REQUIRE(position_ids.dim() == 1, "position_ids", shape(position_ids), "1 dimension");
  check_dtype({"position_ids", position_ids}, ScalarType::Long);
  check_contiguous({"position_ids", position_ids});
  REQUIRE(position_ids.size(0) == rows, "position_ids", shape(position_ids),
          "exactly the " + std::to_string(rows) + " rows of kv");
}

void check_table(const Tensor& table) {
  check_dtype({"cos_sin_cache", table}, ScalarType::Float);
  REQUIRE(table.dim() == 2 && table.size(1) == kRopeDim && table.size(0) > 0, "cos_sin_cache",
          shape(table), "shape [positions, 64] with at least 1 position");
  check_contiguous({"cos_sin_cache", table});
}

void check_eps(double eps) {
  REQUIRE(std::isfinite(static_cast<float>(eps)) && eps >= 0, "eps", eps, "a finite value of at least 0");
}

// Bytes of a tensor as equal pieces, `step` apart: one piece, except for a strided cache.
struct Extent {
  uintptr_t start;
  uintptr_t piece;
  uintptr_t step;
  uintptr_t count;
};

Extent contiguous_extent(const Tensor& tensor) {
  const auto start = reinterpret_cast<uintptr_t>(tensor.const_data_ptr());
  const auto bytes = static_cast<uintptr_t>(tensor.numel()) * tensor.element_size();
  return {start, bytes, bytes, bytes ? 1u : 0u};
}

Extent cache_extent(const Tensor& k_cache) {
  const auto start = reinterpret_cast<uintptr_t>(k_cache.const_data_ptr());
  return {start, static_cast<uintptr_t>(k_cache.size(1)), static_cast<uintptr_t>(k_cache.stride(0)),
          static_cast<uintptr_t>(k_cache.size(0))};
}

// Whether a piece of `many` shares a byte with the single piece of `one`.
bool overlaps(const Extent& many, const Extent& one) {
  if (!many.count || !one.count) return false;
  const uintptr_t first_end = many.start + many.piece;
  const uintptr_t index = one.start < first_end ? 0 : (one.start - first_end) / many.step + 1;
  return index < many.count && many.start + index * many.step < one.start + one.piece;
}

void check_apart(const char* written, const Extent& extent, const Named& other) {
  REQUIRE(!overlaps(extent, contiguous_extent(other.tensor)), written,
          "memory that overlaps " + std::string(other.name), "memory of its own");
}

struct Shared {
  const Tensor& kv;
  const Tensor& k_cache;
  const Tensor& slot_mapping;
  const Tensor& position_ids;
  const Tensor& cos_sin_cache;
  int64_t block_size;
};

void check_shared(const Shared& s) {
  check_context(s.kv);
  check_indices(s.slot_mapping, s.position_ids, s.kv.size(0));
  check_table(s.cos_sin_cache);
  check_cache(s.k_cache, s.block_size, s.slot_mapping.size(0));
}

void check_shared_placement(const Shared& s) {
  check_placement({"k_cache", s.k_cache}, s.k_cache);
  check_placement({"kv", s.kv}, s.k_cache);
  check_placement({"slot_mapping", s.slot_mapping}, s.k_cache);
  check_placement({"position_ids", s.position_ids}, s.k_cache);
  check_placement({"cos_sin_cache", s.cos_sin_cache}, s.k_cache);
  check_supported_device(s.k_cache);
}

void check_shared_memory(const Shared& s) {
  check_aligned({"kv", s.kv}, 16);
  check_aligned({"k_cache", s.k_cache}, 16);
  check_aligned({"slot_mapping", s.slot_mapping}, 8);
  check_aligned({"position_ids", s.position_ids}, 8);
  check_aligned({"cos_sin_cache", s.cos_sin_cache}, 16);
  const Extent cache = cache_extent(s.k_cache);
  check_apart("k_cache", cache, {"kv", s.kv});
  check_apart("k_cache", cache, {"slot_mapping", s.slot_mapping});
  check_apart("k_cache", cache, {"position_ids", s.position_ids});
  check_apart("k_cache", cache, {"cos_sin_cache", s.cos_sin_cache});
}

void check_query_memory(const Named& query, const Shared& s) {
  check_aligned(query, 16);
  REQUIRE(!overlaps(cache_extent(s.k_cache), contiguous_extent(query.tensor)), query.name,
          "memory that overlaps k_cache", "memory of its own");
}

void check_written_query_memory(const Named& query, const Shared& s) {
  check_query_memory(query, s);
  const Extent extent = contiguous_extent(query.tensor);
  check_apart(query.name, extent, {"kv", s.kv});
  check_apart(query.name, extent, {"slot_mapping", s.slot_mapping});
  check_apart(query.name, extent, {"position_ids", s.position_ids});
  check_apart(query.name, extent, {"cos_sin_cache", s.cos_sin_cache});
}

void check_rows(const Tensor& kv, const Named& query) {
  REQUIRE(kv.size(0) == query.tensor.size(0), "kv", shape(kv),
          "the " + std::to_string(query.tensor.size(0)) + " rows of " + query.name);
}

template <typename T>
T* address(const Tensor& tensor) {
  return static_cast<T*>(tensor.mutable_data_ptr());
}

template <typename T>
const T* const_address(const Tensor& tensor) {
  return static_cast<const T*>(tensor.const_data_ptr());
}

Problem shared_problem(const Shared& s) {
  Problem p{};
  p.kv = const_address<uint16_t>(s.kv);
  p.k_cache = address<uint8_t>(s.k_cache);
  p.slot_mapping = const_address<int64_t>(s.slot_mapping);
  p.position_ids = const_address<int64_t>(s.position_ids);
  p.cos_sin = const_address<float>(s.cos_sin_cache);
  p.rows = s.kv.size(0);
  p.inserts = s.slot_mapping.size(0);
  p.blocks = s.k_cache.size(0);
  p.block_stride = s.k_cache.stride(0);
  p.block_size = s.block_size;
  p.max_position = s.cos_sin_cache.size(0);
  p.device_index = on_cpu(place_of(s.k_cache)) ? -1 : place_of(s.k_cache).index;
  return p;
}

std::atomic<bool>& debug_flag() {
  static std::atomic<bool> flag{[] {
    const char* value = std::getenv("VLLM_QOUT_DEBUG");
    return value && *value && std::strcmp(value, "0") != 0;
  }()};
  return flag;
}

}  // namespace

Problem check_fused(
    const Tensor& q_in, const Tensor& kv, const Tensor& q_out, const Tensor& k_cache,
    const Tensor& slot_mapping, const Tensor& position_ids, const Tensor& cos_sin_cache,
    double eps, int64_t cache_block_size, bool apply_q_norm) {
  const Shared shared{kv, k_cache, slot_mapping, position_ids, cos_sin_cache, cache_block_size};
  check_placement({"q_in", q_in}, k_cache);
  check_placement({"q_out", q_out}, k_cache);
  check_shared_placement(shared);
  check_query({"q_in", q_in});
  check_output(q_out, q_in);
  check_context(kv);
  check_rows(kv, {"q_in", q_in});
  check_shared(shared);
  check_eps(eps);
  check_shared_memory(shared);
  check_query_memory({"q_in", q_in}, shared);
  check_written_query_memory({"q_out", q_out}, shared);
  check_apart("q_out", contiguous_extent(q_out), {"q_in", q_in});

  Problem p = shared_problem(shared);
  p.q_in = const_address<uint16_t>(q_in);
  p.q_out = address<uint16_t>(q_out);
  p.heads = q_in.size(1);
  p.padded_heads = q_out.size(1);
  p.eps = static_cast<float>(eps);
  p.apply_q_norm = apply_q_norm;
  return p;
}

Problem check_kv(
    const Tensor& kv, const Tensor& k_cache, const Tensor& slot_mapping, const Tensor& position_ids,
    const Tensor& cos_sin_cache, int64_t cache_block_size) {
  const Shared shared{kv, k_cache, slot_mapping, position_ids, cos_sin_cache, cache_block_size};
  check_shared_placement(shared);
  check_shared(shared);
  check_shared_memory(shared);
  return shared_problem(shared);
}

Problem check_in_place(
    const Tensor& q, const Tensor& kv, const Tensor& k_cache, const Tensor& slot_mapping,
    const Tensor& position_ids, const Tensor& cos_sin_cache, double eps, int64_t cache_block_size,
    bool apply_q_norm) {
  const Shared shared{kv, k_cache, slot_mapping, position_ids, cos_sin_cache, cache_block_size};
  check_placement({"q", q}, k_cache);
  check_shared_placement(shared);
  check_query({"q", q});
  check_context(kv);
  check_rows(kv, {"q", q});
  check_shared(shared);
  check_eps(eps);
  check_shared_memory(shared);
  check_written_query_memory({"q", q}, shared);

  Problem p = shared_problem(shared);
  p.q_in = const_address<uint16_t>(q);
  p.q_out = address<uint16_t>(q);
  p.heads = q.size(1);
  p.padded_heads = q.size(1);
  p.eps = static_cast<float>(eps);
  p.apply_q_norm = apply_q_norm;
  return p;
}

void check_values(
    const int64_t* slot_mapping, int64_t inserts, int64_t slots,
    const int64_t* position_ids, int64_t rows, int64_t max_position) {
  std::unordered_map<int64_t, int64_t> seen;
  seen.reserve(static_cast<size_t>(inserts));
  for (int64_t row = 0; row < inserts; ++row) {
    const int64_t slot = slot_mapping[row];
    REQUIRE(slot >= -1 && slot < slots, "slot_mapping",
            "slot " + std::to_string(slot) + " at row " + std::to_string(row),
            "-1 or a slot below " + std::to_string(slots));
    if (slot < 0) continue;
    const auto [first, fresh] = seen.emplace(slot, row);
    REQUIRE(fresh, "slot_mapping",
            "slot " + std::to_string(slot) + " at rows " + std::to_string(first->second) + " and " +
                std::to_string(row),
            "every slot at most once in a call");
  }
  for (int64_t row = 0; row < rows; ++row) {
    REQUIRE(position_ids[row] >= 0 && position_ids[row] < max_position, "position_ids",
            "position " + std::to_string(position_ids[row]) + " at row " + std::to_string(row),
            "0 to " + std::to_string(max_position - 1) + ", the rows of cos_sin_cache");
  }
}

void check_capability(int64_t major, int64_t minor) {
  const std::string got = "a card of compute capability " + std::to_string(major) + "." + std::to_string(minor);
  REQUIRE(major >= 8, "k_cache", got, "compute capability 8.0 or newer (fp8 conversion)");
  REQUIRE(minor == 0 && (major == 9 || major == 10 || major == 12), "k_cache", got,
          "compute capability 9.0, 10.0 or 12.0, for which this build has machine code; "
          "use the Triton backend on other cards");
}

bool debug_enabled() { return debug_flag().load(std::memory_order_relaxed); }

QOUT_API bool set_debug(bool enabled) { return debug_flag().exchange(enabled); }

}  // namespace qout
