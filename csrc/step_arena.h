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
// One mutex guards all arenas: an allocation holds it for some 100 ns. The step of an arena belongs
// to the thread that began it; buffers may be freed by any thread, and after the arena is closed.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <unordered_map>
#include <vector>

namespace fusedops::arena {

inline constexpr int64_t kOutside = -1;
inline constexpr int64_t kAlive = -1;
inline constexpr int64_t kLeastBytes = 1024;  // smaller buffers are only counted
inline constexpr int64_t kAlignment = 64;     // of every offset, as torch's allocator

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

// Pages that live as long as a buffer in them, or the arena that uses them.
class Block {
 public:
  explicit Block(int64_t size);  // throws std::bad_alloc
  ~Block();
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;

  struct Live {
    int64_t end;  // offset behind it
    int64_t step, plan, entry;
  };

  // The live buffer that overlaps a range, or nullptr.
  const Live* occupant(int64_t offset, int64_t size) const;
  // Gives pages without a live buffer back to the system.
  void drop_free_pages();

  char* base;
  int64_t size;
  std::map<int64_t, Live> live;  // by offset

 private:
  void* mapping_;
  size_t mapped_;
};

class StepArena;

enum class Released { kUnknown, kInBlock, kElsewhere };

// A buffer that an arena knows: one in its block, or one elsewhere whose end it records.
struct Ticket {
  StepArena* arena = nullptr;
  std::shared_ptr<Block> block;  // none: elsewhere
  int64_t step = -1, position = -1, offset = kOutside;
  void (*deleter)(void*) = nullptr;  // of memory elsewhere
  void* context = nullptr;
};

// Arenas are never destroyed: a buffer may outlive everything that knows its arena.
class StepArena {
 public:
  // Starts a step on this thread; with plan -1 nothing is in the block. False if the thread or the
  // arena has an open step.
  bool begin(int64_t plan);
  // A forward begins. Nothing happens on another thread than the step's.
  void mark();
  // Ends the step, from any thread. False if none is open.
  bool end();
  bool is_open() const;       // on any thread
  bool is_open_here() const;  // on this thread
  // Replaces or adds a plan. No step may be open.
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
  friend void* allocate(StepArena&, int64_t, Ticket*);
  friend Released release(void*);

  struct Planned {
    Plan plan;
    std::vector<bool> used;  // positions of the open step
  };

  void* serve(int64_t nbytes, Ticket* ticket);
  int64_t find(int64_t size);
  void freed(const Ticket& ticket);
  void use_block(int64_t height);

  std::unordered_map<int64_t, Planned> plans_;
  std::shared_ptr<Block> block_;
  Record current_, previous_;
  Counts counts_;
  Planned* planned_ = nullptr;
  int64_t plan_id_ = -1, cursor_ = 0, steps_ = 0;
  bool open_ = false;
};

// The arena whose step is open on this thread, or nullptr.
StepArena* current();

// Memory of the block for the open step of this thread; nullptr: the caller takes memory elsewhere
// and, if the ticket has an arena, passes it to `track`.
void* allocate(StepArena& arena, int64_t nbytes, Ticket* ticket);
// Remembers memory elsewhere, so that `release` records its end.
void track(void* pointer, const Ticket& ticket);
// Frees what `allocate` or `track` knows; any other memory is unknown and stays.
Released release(void* pointer);

}  // namespace fusedops::arena
