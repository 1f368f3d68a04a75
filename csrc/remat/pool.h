// Memory for what a step makes and destroys by the thousand: contents, calls, saved tensors.
#pragma once

#include <cstddef>
#include <new>

namespace memsave_ext::remat {

// An allocator for single objects. What is given back goes to a list of the thread that gives it
// back, which takes its next one from there, without torch's or the system's allocator.
template <typename T>
class Pool {
 public:
  using value_type = T;
  Pool() = default;
  template <typename Other>
  Pool(const Pool<Other>&) {}

  T* allocate(size_t count) {
    if (count != 1 || list.first == nullptr)
      return static_cast<T*>(operator new(count * sizeof(T)));
    Free* taken = list.first;
    list.first = taken->next;
    --list.size;
    return reinterpret_cast<T*>(taken);
  }

  void deallocate(T* memory, size_t count) {
    if (count != 1 || list.size >= kMost) return operator delete(memory);
    if (list.first == nullptr) static thread_local AtExit at_exit;
    list.first = new (memory) Free{list.first};
    ++list.size;
  }

  template <typename Other>
  bool operator==(const Pool<Other>&) const {
    return true;
  }

 private:
  struct Free {
    Free* next;
  };
  // Has no destructor: what outlives the thread's other objects is given back here, too.
  struct List {
    Free* first;
    size_t size;
  };
  // Frees the list when the thread ends, after which it takes nothing.
  struct AtExit {
    ~AtExit() {
      while (list.first != nullptr) {
        Free* next = list.first->next;
        operator delete(list.first);
        list.first = next;
      }
      list.size = kMost;
    }
  };
#ifdef __SANITIZE_ADDRESS__
  static constexpr size_t kMost = 0;  // to be told of every use after the end
#else
  static constexpr size_t kMost = 1024;
#endif
  static_assert(sizeof(T) >= sizeof(Free) && alignof(T) <= alignof(std::max_align_t));
  static thread_local List list;
};

template <typename T>
thread_local typename Pool<T>::List Pool<T>::list{};

}  // namespace memsave_ext::remat
