// Contents in a file: threads write and read it while the step goes on.
#include <c10/core/Event.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <stdexcept>
#include <system_error>
#include <thread>
#include <unordered_map>
#include <utility>
#include <variant>
#include <vector>

#include "locks.h"
#include "memory/active.h"
#include "store/ranges.h"
#include "store/store.h"

namespace memsave_ext::store {
namespace {

constexpr int kThreads = 2;
constexpr int64_t kPage = 4096;
// What the speed is measured with before anything was copied.
constexpr int64_t kMeasured = 16 << 20;

double clock_seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Threads that copy. Copies back go first, since somebody waits for them or will soon.
class Copiers {
 public:
  using Job = std::function<void()>;

  // Those of this process: a fork has no threads.
  static Copiers& here() {
    static Lock mutex(LockOrder::kThreadsOfProcess);
    static Copiers* copiers = nullptr;  // not destroyed: its threads run until the process ends
    static pid_t process = 0;
    const std::lock_guard<Lock> lock(mutex);
    if (process != getpid()) {
      copiers = new Copiers();
      process = getpid();
    }
    return *copiers;
  }

  void add(Job job, bool is_back) {
    {
      const std::lock_guard<Lock> lock(mutex_);
      (is_back ? back_ : out_).push_back(std::move(job));
    }
    any_.notify_one();
  }

 private:
  Copiers() {
    std::thread([this] { run(); }).detach();
    try {
      for (int i = 1; i < kThreads; ++i) std::thread([this] { run(); }).detach();
    } catch (const std::system_error&) {  // there may be no more: one does
    }
  }

  void run() {
    while (true) {
      Job job;
      {
        std::unique_lock<Lock> lock(mutex_);
        any_.wait(lock, [this] { return !back_.empty() || !out_.empty(); });
        auto& jobs = back_.empty() ? out_ : back_;
        job = std::move(jobs.front());
        jobs.pop_front();
      }
      job();
    }
  }

  Lock mutex_{LockOrder::kCopies};
  std::condition_variable_any any_;
  std::deque<Job> out_, back_;
};

// A file without a name, and which of its bytes are taken. Room that was written before is taken
// again first: the system is ten times as fast there.
class File {
 public:
  explicit File(const std::string& folder) : descriptor_(open_in(folder)), identity_(identity()) {}
  ~File() {
    if (is_open()) close(descriptor_);
  }
  File(const File&) = delete;
  File& operator=(const File&) = delete;

  int64_t take(int64_t bytes) {
    const int64_t size = whole_pages(bytes);
    const std::lock_guard<Lock> lock(mutex_);
    const auto part = free_.take(size);
    return part ? part->first : std::exchange(end_, end_ + size);
  }

  void give_back(int64_t offset, int64_t bytes) {
    const std::lock_guard<Lock> lock(mutex_);
    free_.give_back(offset, whole_pages(bytes));
  }

  // Both return 0 or the system's number of an error.
  int write(const void* from, int64_t bytes, int64_t offset) const {
    if (!is_open()) return EBADF;
    return all_of(bytes, [&](int64_t done) {
      const auto* at = static_cast<const char*>(from) + done;
      return pwrite(descriptor_, at, static_cast<size_t>(bytes - done), offset + done);
    });
  }
  int read(void* into, int64_t bytes, int64_t offset) const {
    if (!is_open()) return EBADF;
    return all_of(bytes, [&](int64_t done) {
      auto* at = static_cast<char*>(into) + done;
      return pread(descriptor_, at, static_cast<size_t>(bytes - done), offset + done);
    });
  }

 private:
  using Identity = std::pair<dev_t, ino_t>;
  Identity identity() const {
    struct stat found{};
    return fstat(descriptor_, &found) == 0 ? Identity{found.st_dev, found.st_ino} : Identity{};
  }
  // The program may close all its files, as daemons do, and then open others by the same numbers.
  bool is_open() const { return identity() == identity_; }

  static int64_t whole_pages(int64_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }

  template <typename Part>
  static int all_of(int64_t bytes, const Part& part) {
    for (int64_t done = 0; done < bytes;) {
      const ssize_t more = part(done);
      if (more < 0 && errno == EINTR) continue;
      if (more < 0) return errno;
      if (more == 0) return EIO;  // the file is shorter than what was written
      done += more;
    }
    return 0;
  }

  static int open_in(const std::string& folder) {
    int descriptor = open(folder.c_str(), O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
    // Some file systems only know files with names, for a moment.
    if (descriptor < 0 && (errno == EOPNOTSUPP || errno == EISDIR || errno == EINVAL)) {
      std::string name = folder + "/memsave_ext-XXXXXX";
      descriptor = mkostemp(name.data(), O_CLOEXEC);
      if (descriptor >= 0) unlink(name.c_str());
    }
    if (descriptor < 0) throw std::system_error(errno, std::generic_category(), folder);
    return descriptor;
  }

  const int descriptor_;
  const Identity identity_;
  Lock mutex_{LockOrder::kRoomInFile};
  Ranges<std::monostate> free_;
  int64_t end_ = 0;
};

// Memory that copies read beside its storage: it is freed once all have let go of it. Who calls
// resize_() on a storage would else free what is being copied.
struct Shares {
  struct Share {
    int holders;
    c10::DeleterFnPtr free;
  };
  Lock mutex{LockOrder::kShares};
  std::unordered_map<void*, Share> of;  // by the context of the storage's data
};
auto& shares = *new Shares();  // outlives static destruction

void let_go(void* context) {
  c10::DeleterFnPtr free = nullptr;
  {
    const std::lock_guard<Lock> lock(shares.mutex);
    const auto share = shares.of.find(context);
    if (--share->second.holders > 0) return;
    free = share->second.free;
    shares.of.erase(share);
  }
  free(context);
}

// Returns what let_go() is called with; null where nobody frees it. Others may read the storage
// meanwhile: of its data only the deleter is changed.
void* hold_too(c10::StorageImpl& memory) {
  c10::DataPtr& data = memory._mutable_data_ptr_no_checks();
  void* const context = data.get_context();
  const std::lock_guard<Lock> lock(shares.mutex);
  const c10::DeleterFnPtr free = data.get_deleter();
  if (context == nullptr || free == nullptr) return nullptr;
  if (free == &let_go) {
    ++shares.of.at(context).holders;
    return context;
  }
  shares.of[context] = {2, free};
  (void)data.compare_exchange_deleter(free, &let_go);
  return context;
}

// What the copies of a store share. Copies keep it alive.
struct Shared {
  explicit Shared(const std::string& folder) : file(folder) {}

  File file;
  Room room;
  Meter out, back;
  // For the state of all copies.
  Lock mutex{LockOrder::kInFile};
  std::condition_variable_any changed;
};

class InFile final : public Away, public std::enable_shared_from_this<InFile> {
 public:
  // `filled_by`: the stream that fills it, which it is nobody else's memory then.
  InFile(std::shared_ptr<Shared> shared, c10::intrusive_ptr<c10::StorageImpl> memory,
         const std::optional<c10::Stream>& filled_by)
      : shared_(std::move(shared)),
        device_(filled_by ? filled_by->device() : c10::Device(at::kCPU)),
        bytes_(static_cast<int64_t>(memory->nbytes())),
        offset_(shared_->file.take(bytes_)),
        source_(std::move(memory)),
        read_(source_->data()),
        held_(hold_too(*source_)) {
    memory::report_moved(device_, bytes_);
    if (!filled_by) return;
    filled_.emplace(filled_by->device_type());
    filled_->record(*filled_by);
  }

  void begin() { give_to_copiers(&InFile::write, &InFile::end_of_write, false); }

  // Nobody has it but the threads, as long as they copy.
  void abandon() {
    {
      const std::lock_guard<Lock> lock(shared_->mutex);
      is_abandoned_ = true;
      if (jobs_ > 0) return;
    }
    end();
  }

  bool is_out() override { return is_out_.load(std::memory_order_acquire); }

  void wait_until_out() override {
    std::unique_lock<Lock> lock(shared_->mutex);
    shared_->changed.wait(lock, [this] { return is_out(); });
  }

  std::optional<std::string> failure() const override {
    if (error_ == 0) return std::nullopt;
    return std::string(std::strerror(error_));
  }

  c10::intrusive_ptr<c10::StorageImpl> take_source() override {
    {
      const std::lock_guard<Lock> lock(shared_->mutex);
      if (is_writing_ || !(is_out_ || is_cancelled_)) return {};
    }
    let_go_of_it();
    const std::lock_guard<Lock> lock(shared_->mutex);
    return std::move(source_);
  }

  void begin_back(c10::Storage memory) override {
    {
      const std::lock_guard<Lock> lock(shared_->mutex);
      if (into_) return;
      into_ = std::move(memory);
      has_come_ = false;
    }
    try {
      give_to_copiers(&InFile::read, &InFile::end_of_read, true);
    } catch (...) {  // nobody is to wait for it
      const std::lock_guard<Lock> lock(shared_->mutex);
      into_.reset();
      throw;
    }
  }

  bool is_coming() override {
    const std::lock_guard<Lock> lock(shared_->mutex);
    return into_.has_value();
  }

  c10::Storage end_back() override {
    c10::Storage memory;
    {
      std::unique_lock<Lock> lock(shared_->mutex);
      shared_->changed.wait(lock, [this] { return has_come_; });
      memory = std::move(*into_);
      into_.reset();
    }
    if (error_back_ == 0) return memory;
    throw std::runtime_error(
        std::string("remat: what was moved to a file could not be read back: ") +
        std::strerror(error_back_));
  }

  void cancel() override { is_cancelled_ = true; }

 private:
  void give_to_copiers(void (InFile::*work)(), void (InFile::*end_of_work)(), bool is_back) {
    Copiers& copiers = Copiers::here();
    {
      const std::lock_guard<Lock> lock(shared_->mutex);
      ++jobs_;
    }
    copiers.add([self = shared_from_this(), work, end_of_work] { self->run(work, end_of_work); },
                is_back);
  }

  // A thread is done with this copy at the moment at which others see it as done, so that the last
  // of them who lets go gives the room back: S3.
  void run(void (InFile::*work)(), void (InFile::*end_of_work)()) {
    (this->*work)();
    bool is_last = false;
    {
      const std::lock_guard<Lock> lock(shared_->mutex);
      (this->*end_of_work)();
      is_last = --jobs_ == 0 && is_abandoned_;
    }
    shared_->changed.notify_all();
    if (is_last) end();
  }

  // Nobody uses it any more: gives back its room, and its memory.
  void end() {
    let_go_of_it();
    source_.reset();
    into_.reset();
    shared_->file.give_back(offset_, bytes_);
    memory::report_moved(device_, -bytes_);  // before others take the room
    shared_->room.give_back(bytes_);
  }

  // Frees what is copied where its storage has let go of it meanwhile.
  void let_go_of_it() {
    void* held = nullptr;
    {
      const std::lock_guard<Lock> lock(shared_->mutex);
      held = std::exchange(held_, nullptr);
    }
    if (held != nullptr) let_go(held);
  }

  void write() {
    {
      const std::lock_guard<Lock> lock(shared_->mutex);
      is_writing_ = !is_cancelled_;
    }
    if (is_writing_) {
      error_ = wait_until_filled();
      const double begin = clock_seconds();
      if (error_ == 0) error_ = shared_->file.write(read_, bytes_, offset_);
      if (error_ == 0) shared_->out.add(bytes_, clock_seconds() - begin);
    }
    let_go_of_it();  // S1, and before others see that it is out
    if (filled_) source_.reset();
  }
  // Returns the system's number of an error, or 0.
  int wait_until_filled() {
    try {
      if (filled_) filled_->synchronize();
      return 0;
    } catch (const std::exception&) {
      return EIO;  // the device has failed, of which others will tell
    }
  }
  void end_of_write() {
    is_writing_ = false;
    is_out_.store(true, std::memory_order_release);
  }

  void read() {
    if (!is_cancelled_) {
      const double begin = clock_seconds();
      error_back_ = shared_->file.read(into_->mutable_data(), bytes_, offset_);
      if (error_back_ == 0) shared_->back.add(bytes_, clock_seconds() - begin);
    }
  }
  void end_of_read() { has_come_ = true; }

  const std::shared_ptr<Shared> shared_;
  const c10::Device device_;
  const int64_t bytes_, offset_;
  c10::intrusive_ptr<c10::StorageImpl> source_;
  std::optional<c10::Event> filled_;
  const void* const read_;
  void* held_;
  std::atomic<bool> is_out_{false}, is_cancelled_{false};
  bool is_writing_ = false;
  int error_ = 0, error_back_ = 0;
  std::optional<c10::Storage> into_;
  bool has_come_ = false;
  int jobs_ = 0;  // of the threads
  bool is_abandoned_ = false;
};

class FileStore final : public Store {
 public:
  explicit FileStore(std::string folder)
      : folder_(std::move(folder)), shared_(std::make_shared<Shared>(folder_)) {}

  std::shared_ptr<Away> put(c10::intrusive_ptr<c10::StorageImpl> memory,
                            const std::optional<c10::Stream>& made_on, int64_t limit) override {
    const auto bytes = static_cast<int64_t>(memory->nbytes());
    if (!shared_->room.take(bytes, limit)) return nullptr;
    const auto copy = std::make_shared<InFile>(shared_, std::move(memory), made_on);
    std::shared_ptr<Away> away(static_cast<Away*>(copy.get()), [copy](Away*) { copy->abandon(); });
    copy->begin();
    return away;
  }

  Speed speed() override {
    std::call_once(measured_, [this] { measure(); });
    return {shared_->out.bytes_per_second(), shared_->back.bytes_per_second()};
  }

  int64_t used() const override { return shared_->room.used(); }

  std::string name() const override { return folder_; }

  bool takes(c10::Device device) const override { return device.is_cpu(); }

 private:
  // The first time that a part of the file is written is slower than all later ones.
  void measure() {
    std::vector<char> memory(static_cast<size_t>(kMeasured), 1);
    const int64_t offset = shared_->file.take(kMeasured);
    int error = shared_->file.write(memory.data(), kMeasured, offset);
    double begin = clock_seconds();
    if (error == 0) error = shared_->file.write(memory.data(), kMeasured, offset);
    if (error == 0) {
      shared_->out.add(kMeasured, clock_seconds() - begin);
      begin = clock_seconds();
      error = shared_->file.read(memory.data(), kMeasured, offset);
      if (error == 0) shared_->back.add(kMeasured, clock_seconds() - begin);
    }
    shared_->file.give_back(offset, kMeasured);
  }

  const std::string folder_;
  const std::shared_ptr<Shared> shared_;
  std::once_flag measured_;
};

}  // namespace

std::shared_ptr<Store> in_folder(const std::string& folder) {
  static Lock mutex(LockOrder::kFileStores);
  // After a fork both processes would write to the same places of one file.
  static auto& stores = *new std::map<std::pair<pid_t, std::string>, std::weak_ptr<Store>>();
  const std::lock_guard<Lock> lock(mutex);
  auto& found = stores[{getpid(), folder}];
  auto store = found.lock();
  if (!store) found = store = std::make_shared<FileStore>(folder);
  return store;
}

}  // namespace memsave_ext::store
