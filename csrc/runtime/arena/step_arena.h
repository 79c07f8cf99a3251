// The memory of a step at planned addresses in one block, without its binding. No Python and no
// torch, so that a sanitizer can watch it (tests/sanitizers/test_step_arena.py).
//
// A step is a sequence of allocations, counted from 0: the position. A plan has the sizes of the
// sequence, and an offset in the block for each, or kOutside. The n-th allocation of a step gets
// the planned offset if its size is the planned one and no live buffer occupies that range;
// otherwise the caller takes memory elsewhere. Liveness is checked at each allocation, so that a
// plan that does not fit a step costs speed and never a value. When a buffer is freed is recorded
// as the position of its step or of the next one: from that the next plan is made.
//
// One mutex guards all arenas: an allocation holds it for some 100 ns. The step of an arena of the
// host belongs to the thread that began it; buffers may be freed by any thread, and after the arena
// is closed.
//
// The step of an arena on a device has the allocations of all threads on the stream on which it
// began: autograd runs the backward in a thread of its own. As in torch's caching allocator the
// order of the host's calls is that of the stream, so that a place is free once the host has freed
// it. Other streams that use a buffer (`use_on`) are waited for before its place is given out.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <thread>
#include <unordered_map>
#include <vector>

namespace fusedops::arena {

inline constexpr int64_t kOutside = -1;
inline constexpr int64_t kAlive = -1;
inline constexpr int64_t kLeastBytes = 1024;      // smaller buffers are only counted
inline constexpr int64_t kAlignment = 64;         // of every offset, as torch's CPU allocator
inline constexpr int64_t kDeviceAlignment = 512;  // as torch's caching allocator
inline constexpr int kMostDevices = 64;

// Memory and streams of a device. One object for each device, never destroyed.
class Device {
 public:
  explicit Device(int index) : index(index) {}
  virtual ~Device() = default;

  virtual void* allocate(int64_t size, void* stream) = 0;  // throws where there is no memory
  virtual void free(void* pointer) = 0;
  // An event behind all that a stream has to do; nullptr: there can be none now.
  virtual void* record(void* stream) = 0;
  // Lets a stream wait for an event, and frees the event.
  virtual void wait(void* stream, void* event) = 0;

  const int index;  // below kMostDevices
};

struct Plan {
  std::vector<int64_t> sizes, offsets;  // by position
  std::vector<int64_t> marks;           // positions at which forwards begin
  int64_t height = 0;                   // bytes of the block that it needs
};

// What a step allocated.
struct Record {
  int64_t step = -1;
  std::vector<int64_t> sizes;    // by position, aligned
  std::vector<int64_t> ends;     // position before which it was freed, or kAlive
  std::vector<int64_t> in_next;  // 1: `ends` is a position of the next step
  std::vector<int64_t> marks;
};

// Bytes and numbers of one step.
struct Counts {
  int64_t buffers = 0, bytes = 0;      // all of at least kLeastBytes
  int64_t served = 0;                  // bytes in the block
  int64_t unplanned = 0;               // bytes at positions that the plan does not have
  int64_t occupied = 0;                // bytes whose place a live buffer of this step had
  int64_t kept = 0;                    // bytes whose place a buffer of an earlier step had
  int64_t outside = 0;                 // bytes that the plan has outside of the block
  int64_t small = 0, small_bytes = 0;  // buffers below kLeastBytes
};

// Pages of the host, or memory of a device, that live as long as a buffer in them, or the arena
// that uses them.
class Block {
 public:
  // Throws where there is no memory. `stream`: of the device, the one that uses the block.
  explicit Block(int64_t size, Device* device = nullptr, void* stream = nullptr);
  ~Block();
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;

  struct Live {
    int64_t end;  // offset behind it
    int64_t step, plan, entry;
  };

  // The live buffer that overlaps a range, or nullptr.
  const Live* occupant(int64_t offset, int64_t size) const;
  // Gives pages of the host without a live buffer back to the system.
  void drop_free_pages();
  // Frees a place that other streams may still use. Where there is no event of one the place
  // stays occupied.
  void free_place(int64_t offset, const std::vector<void*>& streams);
  // Lets the block's stream wait for what others do in a range.
  void wait_for_others(int64_t offset, int64_t size);

  char* base;
  int64_t size;
  void* const stream;            // of the device; places are free in its order
  std::map<int64_t, Live> live;  // by offset

 private:
  struct Busy {
    int64_t begin, end;
    void* event;
  };

  Device* const device_;
  void* mapping_ = nullptr;
  size_t mapped_ = 0;
  std::vector<Busy> busy_;
};

class StepArena;

// Where a buffer lies, as `release` and `use_on` say.
enum class Released { kUnknown, kInBlock, kElsewhere };

// A buffer that an arena knows: one in its block, or one elsewhere whose end it records.
struct Ticket {
  StepArena* arena = nullptr;
  std::shared_ptr<Block> block;  // none: elsewhere
  int64_t step = -1, position = -1, offset = kOutside;
  void (*deleter)(void*) = nullptr;  // of memory elsewhere
  void* context = nullptr;
  std::vector<void*> streams;  // that use the buffer besides the block's
};

// Arenas are never destroyed: a buffer may outlive everything that knows its arena.
class StepArena {
 public:
  // In memory of the host, or of a device.
  explicit StepArena(Device* device = nullptr) : device_(device) {}

  // Starts a step on this thread; with plan -1 nothing is in the block. False if the thread, or
  // the device, or the arena has an open step. `stream`: of the device, that of the step.
  bool begin(int64_t plan, void* stream = nullptr);
  // A forward begins. Nothing happens on another thread than the step's.
  void mark();
  // Ends the step, from any thread. False if none is open.
  bool end();
  bool is_open() const;       // on any thread
  bool is_open_here() const;  // on this thread
  // The next three throw std::logic_error while a step is open, on any thread.
  // Replaces or adds a plan.
  void set_plan(int64_t id, Plan plan);
  void drop_plan(int64_t id);
  // Another block for the same plans: the present one has buffers that are kept.
  void renew();
  // Forgets plans, records and the block, which lives as long as buffers in it.
  void close();

  Record record(bool previous) const;  // of the last step, or of the one before
  Counts counts() const;               // of the last step
  int64_t block_bytes() const;
  int64_t live_bytes() const;  // in the block
  bool contains(const void* pointer) const;

 private:
  friend void* allocate(StepArena&, int64_t, Ticket*, void*);
  friend Released release(void*);

  struct Planned {
    Plan plan;
    std::vector<bool> used;  // positions of the open step
  };

  void* serve(int64_t nbytes, Ticket* ticket);
  int64_t find(int64_t size);
  void freed(const Ticket& ticket);
  void use_block(int64_t height);
  // The arena whose step is open on this thread, or on the device of this one.
  StepArena* open_arena() const;
  void set_open_arena(StepArena* arena) const;
  void end_open_step();
  void check_no_step(const char* function) const;

  std::unordered_map<int64_t, Planned> plans_;
  std::shared_ptr<Block> block_;
  Record current_, previous_;
  Counts counts_;
  Planned* planned_ = nullptr;
  int64_t plan_id_ = -1, cursor_ = 0, steps_ = 0;
  bool open_ = false;
  std::thread::id owner_;  // of the open step
  Device* const device_;
  void* stream_ = nullptr;  // of the device, on which the step began
};

// The arena of the host whose step is open on this thread, or nullptr.
StepArena* current();
// The arena whose step is open on a device, or nullptr.
StepArena* current_on(int device);

// Memory of the block for the open step of this thread; nullptr: the caller takes memory elsewhere
// and, if the ticket has an arena, passes it to `track`. `stream`: of the device; the step has
// nothing on other streams than its own.
void* allocate(StepArena& arena, int64_t nbytes, Ticket* ticket, void* stream = nullptr);
// Remembers memory elsewhere, so that `release` records its end.
void track(void* pointer, const Ticket& ticket);
// Frees what `allocate` or `track` knows; any other memory is unknown and stays.
Released release(void* pointer);
// The block that has a live buffer at a pointer, or nullptr.
std::shared_ptr<Block> block_of(void* pointer);
// Notes that a stream uses a buffer. For memory elsewhere it fills in the ticket, and the caller
// tells the allocator that this memory is from.
Released use_on(void* pointer, void* stream, Ticket* ticket);

}  // namespace fusedops::arena
