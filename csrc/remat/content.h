// What a storage holds between two writes, and how it is computed again.
//
// Storages and not tensors: views and aliases share memory, and a change in place of one of them
// changes all. A tensor is a content and a geometry.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <c10/core/Storage.h>
#include <c10/util/SmallVector.h>

#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "remat/operators.h"
#include "remat/random.h"

namespace memsave_ext::remat {

struct Content;
struct Call;

// Where a tensor lies in its storage.
struct Geometry {
  c10::SmallVector<int64_t, 5> sizes, strides;
  int64_t offset = 0;
  caffe2::TypeMeta dtype;
  c10::DispatchKeySet keys;  // with the bits for conjugate and negative

  static Geometry of(const at::Tensor& tensor);
  void assign(const at::Tensor& tensor);
  int64_t extent() const;  // up to which byte of its storage it reaches
  // A tensor on this storage, without history.
  at::Tensor view(c10::Storage storage) const;
};

// Whether a tensor is memory with a geometry: dense or strided, no wrapper of others, not of meta.
bool is_plain(const at::Tensor& tensor);

// An argument of a call.
struct Reference {
  size_t argument;  // which
  int64_t element;  // of an argument that is a list; -1
  std::shared_ptr<Content> content;
  Geometry geometry;
  c10::VariableVersion version;  // shared with the tensor
  uint32_t noted;                // what it was at the call
  bool written;
  bool overwritten;  // likewise, whatever was there before

  // Whether the memory that the content was in has been written since the call. Writes that the
  // recorder sees make another content; this tells of all.
  bool changed() const { return version.enabled() && version.current_version() != noted; }
};

// An operator that was called.
struct Call {
  const Operator* op = nullptr;
  std::vector<c10::IValue> arguments;  // None where a tensor was
  std::vector<Reference> references;
  std::optional<Random> random;
  at::Tensor mask;  // what it made, as bits; undefined where it is called again
  double seconds = 0;
  int32_t module = -1;  // which one called it, by the recorder's numbers
  // What it made, of which anything may be gone by now.
  struct Made {
    std::weak_ptr<Content> content;
    size_t output;      // which value of those it returned
    int64_t element;    // of one that is a list; -1
    int64_t reference;  // of a change in place: of the argument that was written; else -1
  };
  std::vector<Made> made;
};

// Guarded by contents_mutex(), but for what never changes.
struct Content {
  c10::weak_intrusive_ptr<c10::StorageImpl> storage;  // as it was made; keeps its address
  const int64_t bytes;
  const c10::Device device;
  const uint64_t born;           // a count of all contents
  const bool external;           // not made in this block: a parameter, an input
  std::shared_ptr<Call> call;    // null: it cannot be computed again
  int depth = 0;                 // of calls that were not saved, up to what was
  int32_t module = -1;           // which one made it, by the recorder's numbers
  const Operator* op = nullptr;  // likewise, if any was seen

  // Held where it is kept or was computed again; null where it is dropped, or nobody saved it.
  c10::intrusive_ptr<c10::StorageImpl> held;
  int64_t extent = 0;        // what dropped ones read of `held`
  bool overwritten = false;  // the storage holds something else by now
  bool copied = false;       // `held` is a copy, made before the storage was written
  bool relied_on = false;    // by dropped ones, which are computed from its call, not from it
  bool dropped = false;      // its holders rely on its call
  bool decided = false;      // kept or dropped
  int dropped_depth = 0;     // how many dropped ones it is computed from, one after the other
  int64_t holders = 0;       // saved tensors
  int64_t pins = 0;          // dropped contents that need it
  std::vector<std::shared_ptr<Content>> needs;  // of a dropped one: what it pins
  uint64_t fill = 0;                            // how often it was computed again
  int64_t unopened = 0;                         // holders that have not opened it since

  Content(const c10::Storage& storage, bool external);
  // What it holds is something else by now. With the mutex.
  bool is_lost() const { return overwritten && !copied && fill == 0; }
};

uint64_t contents_so_far();

// Innermost: nothing is called and no tensor is freed with it.
std::mutex& contents_mutex();

// What is freed once the mutex is not held any more. Declare before the lock.
using Freed = std::vector<c10::intrusive_ptr<c10::StorageImpl>>;

// All with the mutex.

// A dropped content needs it, or does not any more.
void pin(Content& content);
void unpin(Content& content);

// A content that nobody saved or needs gives up what it holds.
void release_unused(std::shared_ptr<Content> content, Freed& freed,
                    std::vector<std::shared_ptr<Content>>& contents);

}  // namespace memsave_ext::remat
