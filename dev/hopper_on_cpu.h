// What gpt/hopper.cuh has in PTX, on the CPU: an addition to dev/cuda_on_cpu.h, which is to be read first.
//
// Copies and products go on beside the threads, as on the GPU, and take any time up to the wait: mostly some turns of the
// threads, sometimes all until nothing else can run. So what a kernel does is right at any speed of theirs, or:
//
//   a copy not waited for                what it overwrites is NaN (bytes 0xFF) from its start on
//   a slab released too early            the next copy's NaN, or its data, come into the product
//   a product not waited for             its accumulators are NaN until then; a warp's factors are read as soon as it comes, or
//                                        at the wait, so both a missing barrier before and one behind show
//   a wrong descriptor                   is decoded as the GPU does it, and gives another product
//   too many bytes or arrivals           a message; with too few it is a deadlock, and a message that says where how many miss
//   more registers than there are        a deadlock, and a message
//   accumulators written in between,     a message
//   no wgmma_fence, commit or wait,
//   a warp with other products
//
// Not found: a missing fence_async(), barrier_init_fence() or registers_settled(); registers of A that are written before the wait.
// wgmma_fence() is asked for after every wgmma_wait(), before the next products on accumulators that are not under way, which is
// more than the manual asks for.
#ifndef HOPPER_ON_CPU_H
#define HOPPER_ON_CPU_H

struct TensorMap { const bf16 *tensor; int B, T, slots, HS, rows; };

namespace cuda_on_cpu {

// A barrier's 64 bits. What is only poison has no `valid`.
struct Phase {
    uint64_t arrivals : 20, missing : 20;  // in each phase; still in this one
    int64_t bytes : 21;                    // expected less arrived; below 0 for a while, if copies are faster than barrier_expect
    uint64_t parity : 1, valid : 2;
};
static_assert(sizeof(Phase) == sizeof(Barrier), "a phase takes the place of a barrier");

// A copy under way: of a box, or `bytes` bytes as they are.
struct Transfer {
    TensorMap map;
    int column, row, slot, batch;
    unsigned char *shared;
    unsigned bytes;
    const void *from = NULL;         // of a bulk_load
    Barrier *barrier = NULL;         // of a load
    unsigned thread = 0, group = 0;  // of a store, and what of it has happened
    bool store = false, read = false, written = false, awaited = false;
    void *to = NULL;                       // of a bulk_store or bulk_add
    bool add = false;
    std::vector<unsigned char> data = {};  // what was read
    uint64_t due = 0;                      // when its next step is, by the engine's clock
};

// A wgmma by the four warps of a warpgroup, which it takes all to end: so kernels let one thread say for all that they have read
// their factors. But each warp may begin when it comes.
struct Product {
    uint64_t hash;  // of what follows, on which all lanes of all warps have to agree
    uint64_t a, b;  // descriptors
    unsigned n, group, form;
    unsigned came, computed;     // warps as bits
    float *accumulator[4];       // of each warp, by lane 0's
    uint32_t left[4][LANES][4];  // A, if in registers
};
enum { A_IS_TRANSPOSED = 1, B_IS_TRANSPOSED = 2, A_IN_REGISTERS = 4, ACCUMULATE = 8 };  // form

typedef float Floats __attribute__((vector_size(32), may_alias));  // 8 columns
struct Accumulator {
    float *d[LANES];  // where the lanes have it; NaN while products are under way
    unsigned n, group;
    alignas(32) Floats value[16][16];  // (m, n / 8)
};

struct WarpProducts {
    Product next;  // the wgmma to which the lanes are coming, with these registers;
    uint32_t left[LANES][4];
    float *d[LANES];
    unsigned newest;  // of the wgmma_wait to which they are coming: how many groups may stay
    unsigned started;
    std::map<float *, Accumulator> accumulators;  // under way, by lane 0's
};

struct Warpgroup {
    std::vector<Product> queue;    // under way
    unsigned over;                 // how many have been
    std::vector<Fiber *> waiting;  // for the rest of the warps to come
    bool at_once;                  // each warp's part is computed as it comes, not at the wait
};

struct Waiting { Barrier *barrier; Fiber *fiber; unsigned parity; };
struct NamedBarrier { unsigned threads, arrived; std::vector<Fiber *> waiting; };

inline const Operation BARRIER_WAIT = {"barrier_wait", NULL}, NAMED_BARRIER_SYNC = {"named_barrier_sync", NULL},
                       SET_REGISTERS = {"registers_increase", NULL};

struct Hopper : Engine {
    Block *block;
    uint64_t clock = 0, next_due = UINT64_MAX;
    std::vector<Transfer> transfers;
    std::vector<Waiting> waiters;
    Fiber *woken = NULL;  // the last that a barrier let go on
    NamedBarrier named[16] = {};
    struct {
        unsigned stores, products;  // groups committed
        bool fenced;                // by wgmma_fence, since the last wgmma_wait
    } threads[MAX_THREADS] = {};
    unsigned registers[MAX_WARPS] = {}, register_count = 0;  // of a thread of each warp; of all warps, a thread each
    std::vector<Fiber *> waiting_for_registers;
    WarpProducts warps[MAX_WARPS] = {};
    Warpgroup warpgroups[MAX_WARPS / 4] = {};

    explicit Hopper(Block *block) : block(block) {}

    std::string place(const void *address) {
        char text[20];
        ptrdiff_t offset = (const unsigned char *)address - block->dynamic_shared;
        snprintf(text, sizeof text, "%p", address);
        if (offset < 0 || (size_t)offset >= block->launch->shared_bytes) return text;
        return "dynamic shared memory + " + std::to_string(offset);
    }

    // ---- Barriers

    Phase phase(Barrier *barrier) {
        Phase now;
        memcpy(&now, barrier, sizeof now);
        if (now.valid != 1) stop("the barrier at %s has not been initialized", place(barrier).c_str());
        return now;
    }

    // Keeps the barrier's new state, and ends the phase if nothing is missing.
    void update(Barrier *barrier, Phase now) {
        if (!now.missing && now.bytes < 0)
            stop("%lld bytes more than expected came to the barrier at %s", -(long long)now.bytes, place(barrier).c_str());
        if (!now.missing && !now.bytes) {
            now.missing = now.arrivals;
            now.parity ^= 1;
            for (size_t i = waiters.size(); i-- > 0;) {
                if (waiters[i].barrier != barrier) continue;
                wake(woken = waiters[i].fiber);
                waiters.erase(waiters.begin() + (ptrdiff_t)i);
            }
        }
        memcpy(barrier, &now, sizeof now);
    }

    void arrive(Barrier *barrier, unsigned bytes) {
        Phase now = phase(barrier);
        if (!now.missing) stop("more than the %u arrivals of the barrier at %s", (unsigned)now.arrivals, place(barrier).c_str());
        if (now.bytes + bytes >= 1 << 20) stop("a barrier cannot expect 2^20 bytes (%s)", place(barrier).c_str());
        now.missing--;
        now.bytes += bytes;
        update(barrier, now);
    }

    std::string waiting() override {
        std::string text;
        char line[100];
        for (const Waiting &waiter : waiters) {
            Phase now = phase(waiter.barrier);
            snprintf(line, sizeof line, ", parity %u, misses %u of %u arrivals and %lld bytes", waiter.parity,
                     (unsigned)now.missing, (unsigned)now.arrivals, (long long)now.bytes);
            std::string all = "\n  the barrier at " + place(waiter.barrier) + line;
            if (text.find(all) == std::string::npos) text += all;
        }
        for (int id = 0; id < 16; id++) {
            const NamedBarrier &barrier = named[id];
            snprintf(line, sizeof line, "\n  %u of %u threads have come to named barrier %d", barrier.arrived, barrier.threads, id);
            if (barrier.arrived) text += line;
        }
        return text;
    }

    // ---- Copies

    // Mostly soon, but now and then in thousands of turns.
    uint64_t some_time_later() {
        uint32_t random = random_bits(block);
        return clock + (random >> 8 & ((1u << random % 13) - 1));
    }

    void start(Transfer &&transfer) {
        transfer.due = some_time_later();
        next_due = std::min(next_due, transfer.due);
        transfers.push_back(std::move(transfer));
    }

    // Between a slab and the tensor; `slab` is in the slab's order.
    void copy_box(const Transfer &box, unsigned char *slab, bool to_tensor) {
        const TensorMap &map = box.map;
        for (int i = 0; i < map.rows * 8; i++) {
            int row = i / 8, chunk = i % 8, t = box.row + row, column = box.column + 8 * chunk;
            unsigned char *in_slab = slab + 128 * row + 16 * (chunk ^ row % 8);
            bool inside = t >= 0 && t < map.T && column >= 0 && column < map.HS && box.slot >= 0 && box.slot < map.slots &&
                box.batch >= 0 && box.batch < map.B;
            bf16 *in_tensor = (bf16 *)map.tensor + (((ptrdiff_t)box.batch * map.T + t) * map.slots + box.slot) * map.HS + column;
            if (inside) memcpy(to_tensor ? (void *)in_tensor : in_slab, to_tensor ? in_slab : (void *)in_tensor, 16);
            else if (!to_tensor) memset(in_slab, 0, 16);
        }
    }

    // The next that happens to it: a load arrives; a store is read, then written.
    void advance(Transfer &transfer) {
        transfer.due = UINT64_MAX;
        if (!transfer.store) {
            if (transfer.from) memcpy(transfer.shared, transfer.from, transfer.bytes);
            else copy_box(transfer, transfer.shared, false);
            Phase now = phase(transfer.barrier);
            now.bytes -= transfer.bytes;
            transfer.written = transfer.awaited = true;
            update(transfer.barrier, now);
        } else if (!transfer.read) {
            transfer.read = true;
            transfer.data.assign(transfer.shared, transfer.shared + transfer.bytes);
            transfer.due = some_time_later();
        } else {
            transfer.written = true;
            if (!transfer.to) copy_box(transfer, transfer.data.data(), true);
            else if (!transfer.add) memcpy(transfer.to, transfer.data.data(), transfer.bytes);
            else for (unsigned i = 0; i < transfer.bytes / 4; i++) ((float *)transfer.to)[i] += ((float *)transfer.data.data())[i];
        }
    }

    void forget_finished() {
        auto finished = [](const Transfer &transfer) { return transfer.written && transfer.awaited; };
        transfers.erase(std::remove_if(transfers.begin(), transfers.end(), finished), transfers.end());
        next_due = UINT64_MAX;
        for (const Transfer &transfer : transfers) next_due = std::min(next_due, transfer.due);
    }

    void step() override {
        clock++;
        while (next_due <= clock || (!block->runnable && next_due < UINT64_MAX)) {
            uint64_t due = next_due;
            advance(*std::find_if(transfers.begin(), transfers.end(), [=](const Transfer &t) { return t.due == due; }));
            forget_finished();
        }
    }

    void wait_for_stores(unsigned thread, unsigned newest, bool only_read) {
        for (Transfer &transfer : transfers) {
            if (!transfer.store || transfer.thread != thread || transfer.group + newest >= threads[thread].stores) continue;
            while (!transfer.read || !(transfer.written || only_read)) advance(transfer);
            transfer.awaited = true;
        }
        forget_finished();
    }

    void thread_ends(Fiber *fiber) override {
        unsigned thread = (unsigned)(fiber - block->fibers), w = thread / LANES;
        for (const Transfer &transfer : transfers)
            if (transfer.store && transfer.thread == thread && !transfer.awaited)
                stop("thread %u ends without a wait for its stores", thread);
        if (!warps[w].accumulators.empty()) stop("warp %u ends without a wait for its products", w);
        if (block->alive > 1) return;
        for (Transfer &transfer : transfers) {
            if (!transfer.store) stop("the block ends while a copy is under way to %s", place(transfer.shared).c_str());
            while (!transfer.written) advance(transfer);
        }
    }

    // ---- Products

    // 16 of k of `count` rows or columns of a factor, from `first` on, to to[k * stride + ...]. ("Strides", "Matrix Descriptor")
    void read_factor(uint64_t descriptor, bool transposed, unsigned first, unsigned count, float *to, unsigned stride) {
        auto field = [=](int bit) { return (size_t)(descriptor >> bit & 0x3FFF) << 4; };
        const size_t start = field(0), leading_bytes = field(16), stride_bytes = field(32);
        if ((descriptor & ~0x3FFF3FFF3FFFull) != (uint64_t)1 << 62 || start / 128 % 8)
            stop("descriptor 0x%016llx is not one of matrix_descriptor() for a slab that starts at a multiple of 1024",
                 (unsigned long long)descriptor);
        for (unsigned i = 0; i < count * 2; i++) {  // a chunk: 8 of n at one k, if transposed, else 8 of k at one n
            unsigned n = first + (transposed ? i / 16 * 8 : i / 2), k = transposed ? i % 16 : i % 2 * 8;
            size_t at = start + (transposed ? k % 8 * 128 + k / 8 * stride_bytes + n / 8 % 8 * 16 + n / 64 * leading_bytes
                                            : n % 8 * 128 + n / 8 * stride_bytes + k * 2);
            at ^= at >> 3 & 0x70;
            if (at + 16 > block->launch->shared_bytes)
                stop("wgmma reads beyond shared memory, at byte %zu of %zu", at, block->launch->shared_bytes);
            const bf16 *chunk = (const bf16 *)(block->dynamic_shared + at);
            float *place = to + k * stride + (n - first);
            for (unsigned j = 0; j < 8; j++) place[transposed ? j : j * stride] = chunk[j];
        }
    }

    void read_left(const uint32_t (&left)[LANES][4], float (&a)[16][16]) {
        for (unsigned lane = 0; lane < LANES; lane++) {
            for (unsigned i = 0; i < 4; i++) {
                float2 pair = unpack_bf16(left[lane][i]);
                unsigned m = lane / 4 + i % 2 * 8, k = lane % 4 * 2 + i / 2 * 8;
                a[k][m] = pair.x;
                a[k + 1][m] = pair.y;
            }
        }
    }

    // Computes the part of some warps, given as bits.
    void compute(unsigned group, Product &product, unsigned which) {
        alignas(32) float a[16][16], b[16][128];  // (k, m) of a warp, and (k, n)
        if (which) read_factor(product.b, product.form & B_IS_TRANSPOSED, 0, product.n, b[0], 128);
        product.computed |= which;
        for (unsigned w = 0; w < 4; w++) {
            if (!(which >> w & 1)) continue;
            if (product.form & A_IN_REGISTERS) read_left(product.left[w], a);
            else read_factor(product.a, product.form & A_IS_TRANSPOSED, w * 16, 16, a[0], 16);
            Accumulator &to = warps[group * 4 + w].accumulators.at(product.accumulator[w]);
            for (unsigned m = 0; m < 16; m++) {
                for (unsigned j = 0; j < product.n / 8; j++) {
                    Floats sum = {};
                    for (unsigned k = 0; k < 16; k++) sum += a[k][m] * *(const Floats *)&b[k][8 * j];
                    to.value[m][j] = product.form & ACCUMULATE ? to.value[m][j] + sum : sum;
                }
            }
        }
    }

    // Moves the elements of each lane; to the lanes, or from them, which leaves NaN there.
    void exchange(Accumulator &accumulator, bool to_lanes) {
        for (unsigned lane = 0; lane < LANES; lane++) {
            for (unsigned i = 0; i < accumulator.n / 2; i++) {
                float *in_lane = &accumulator.d[lane][i], *row = (float *)accumulator.value[lane / 4 + i / 2 % 2 * 8];
                float *value = row + i / 4 * 8 + lane % 4 * 2 + i % 2;
                if (to_lanes && __float_as_uint(*in_lane) != UINT32_MAX) stop("accumulators were written to before wgmma_wait");
                *(to_lanes ? in_lane : value) = *(to_lanes ? value : in_lane);
                if (!to_lanes) *in_lane = __uint_as_float(UINT32_MAX);
            }
        }
    }

    void start_product(unsigned w) {
        Warpgroup &group = warpgroups[w / 4];
        WarpProducts &warp = warps[w];
        const Product &next = warp.next;
        const bool under_way = warp.accumulators.count(warp.d[0]);
        Accumulator &accumulator = warp.accumulators[warp.d[0]];
        if (!under_way) {
            for (unsigned lane = 0; lane < LANES; lane++)
                if (!threads[w * LANES + lane].fenced) stop("no wgmma_fence before the first wgmma on accumulators");
            std::copy_n(warp.d, LANES, accumulator.d);
            accumulator.n = next.n;
            exchange(accumulator, false);
        }
        if (accumulator.n != next.n) stop("wgmma with N = %u on accumulators of one with N = %u", next.n, accumulator.n);
        accumulator.group = next.group;

        const size_t number = warp.started++ - group.over;
        if (group.queue.empty() || random_bits(block) % 16 == 0) group.at_once = random_bits(block) % 2;
        if (number == group.queue.size()) group.queue.push_back(next);
        Product &product = group.queue[number];
        if (product.hash != next.hash) stop("the warps of warpgroup %u differ in their products", w / 4);
        const unsigned bit = 1u << w % 4;
        product.came |= bit;
        product.accumulator[w % 4] = warp.d[0];
        memcpy(product.left[w % 4], warp.left, sizeof warp.left);
        for (size_t i = 0; group.at_once && i <= number; i++) compute(w / 4, group.queue[i], bit & ~group.queue[i].computed);
        if (product.came != 15) return;
        for (Fiber *fiber : group.waiting) wake(fiber);
        group.waiting.clear();
    }

    // How many of a warpgroup's products have to be over at this wait. All its warps have to have come to them first.
    size_t to_finish(unsigned thread, unsigned newest, bool *all_came) {
        const std::vector<Product> &queue = warpgroups[thread / LANES / 4].queue;
        size_t count = 0;
        for (*all_came = true; count < queue.size() && queue[count].group + newest < threads[thread].products; count++)
            *all_came &= queue[count].came == 15;
        return count;
    }

    void finish_products(unsigned w) {
        WarpProducts &warp = warps[w];
        Warpgroup &group = warpgroups[w / 4];
        bool all_came;
        const size_t count = to_finish(w * LANES, warp.newest, &all_came);
        for (size_t i = 0; i < count; i++) compute(w / 4, group.queue[i], 15 & ~group.queue[i].computed);
        group.queue.erase(group.queue.begin(), group.queue.begin() + (ptrdiff_t)count);
        group.over += (unsigned)count;
        for (auto i = warp.accumulators.begin(); i != warp.accumulators.end();) {
            const bool over = i->second.group + warp.newest < threads[w * LANES].products;
            if (over) exchange(i->second, true);
            i = over ? warp.accumulators.erase(i) : std::next(i);
        }
        for (unsigned lane = 0; lane < LANES; lane++) threads[w * LANES + lane].fenced = false;
    }
};

inline Hopper &hopper() {
    Block *block = self->block;
    if (!block->engine) block->engine.reset(new Hopper(block));
    return static_cast<Hopper &>(*block->engine);
}
inline unsigned thread_number() { return (unsigned)(self - self->block->fibers); }
inline unsigned warp_number() { return thread_number() / LANES; }

// A block has what it has at its start, as many for each thread as 65536 allow: an increase waits for others' decrease.
__noinline__ inline void set_registers(unsigned count) {
    Fiber *me = self;
    Hopper &engine = hopper();
    const unsigned w = warp_number(), warps = me->block->thread_count / LANES;
    if (!engine.register_count) {
        std::fill_n(engine.registers, warps, std::min(65536 / me->block->thread_count / 8 * 8, 248u));
        engine.register_count = std::accumulate(engine.registers, engine.registers + warps, 0u);
    }
    for (;;) {
        const unsigned others = std::accumulate(engine.registers, engine.registers + warps, 0u) - engine.registers[w];
        if (others + count <= engine.register_count) break;
        engine.waiting_for_registers.push_back(me);
        block_lane(me, &SET_REGISTERS, 0);
        run_next(me);
    }
    engine.registers[w] = count;
    for (Fiber *fiber : engine.waiting_for_registers) wake(fiber);
    engine.waiting_for_registers.clear();
}

// At what others may have waited for, now and then another warp comes next: any, or often one that has waited just for this. It may
// be the one that is too early.
__noinline__ inline void let_others_run() {
    Block *block = self->block;
    Fiber *woken = hopper().woken;
    hopper().woken = NULL;
    if (random_bits(block) % (woken ? 2 : 4)) return;
    block->current = woken ? (unsigned)(woken->warp - block->warps) : random_bit(block->runnable, random_bits(block));
    run_next(self);
}

inline void start_transfer(Transfer transfer, size_t alignment) {
    const uintptr_t others = (uintptr_t)transfer.from | (uintptr_t)transfer.to | transfer.bytes;
    if ((uintptr_t)transfer.shared % alignment || others % 16 || transfer.column % 8)
        stop("a copy of %u bytes, from column %d, from or to %s: that has to be a multiple of %zu, the column of 8, others of 16",
             transfer.bytes, transfer.column, hopper().place(transfer.shared).c_str(), alignment);
    if (!transfer.store) memset(transfer.shared, 0xFF, transfer.bytes);
    hopper().start(std::move(transfer));
    let_others_run();
}

inline void check_lanes(const char *name, const Warp &warp, uint32_t group) {
    if (group != UINT32_MAX) stop("%s by lanes 0x%08x only: it needs the whole warp", name, group);
    for (unsigned lane = 1; lane < LANES; lane++)
        if (warp.in[lane] != warp.in[0]) stop("%s: lanes 0 and %u differ in what they ask for", name, lane);
}
inline void work_wgmma(Warp &warp, uint32_t group) {
    check_lanes("wgmma", warp, group);
    hopper().start_product(warp_number());
}
inline void work_wgmma_wait(Warp &warp, uint32_t group) {
    check_lanes("wgmma_wait", warp, group);
    hopper().finish_products(warp_number());
}
inline void work_stmatrix(Warp &warp, uint32_t group) {
    if (group != UINT32_MAX) stop("stmatrix by lanes 0x%08x only: it needs the whole warp", group);
    work_shuffle(warp, group);
}
inline const Operation WGMMA = {"wgmma", work_wgmma}, WGMMA_WAIT = {"wgmma_wait", work_wgmma_wait},
                       STMATRIX = {"stmatrix", work_stmatrix};

__noinline__ inline void start_wgmma(float *d, unsigned n, uint64_t a, const uint32_t *left, uint64_t b, unsigned form) {
    Fiber *me = self;
    const unsigned w = warp_number(), group = hopper().threads[thread_number()].products;
    if (me->block->thread_count < (w / 4 + 1) * 4 * LANES) stop("wgmma by warp %u, whose warpgroup has not four warps", w);
    WarpProducts &warp = hopper().warps[w];
    warp.d[me->lane] = d;
    if (left) memcpy(warp.left[me->lane], left, sizeof warp.left[0]);
    warp.next = {mix(mix(mix(a, b), n), mix(group, form)), a, b, n, group, form, 0, 0, {}, {}};
    me->warp->in[me->lane] = warp.next.hash;
    meet_warp(&WGMMA, UINT32_MAX);
}

__noinline__ inline void wait_for_products(unsigned newest) {
    Fiber *me = self;
    Hopper &engine = hopper();
    const unsigned thread = thread_number(), w = warp_number();
    for (;;) {
        bool all_came;
        engine.to_finish(thread, newest, &all_came);
        if (all_came) break;
        engine.warpgroups[w / 4].waiting.push_back(me);
        block_lane(me, &WGMMA_WAIT, 0);
        run_next(me);
    }
    engine.warps[w].newest = newest;
    me->warp->in[me->lane] = mix(newest, engine.threads[thread].products);
    meet_warp(&WGMMA_WAIT, UINT32_MAX);
}

}  // namespace cuda_on_cpu

// ----------------------------------------------------------------------------
// What kernels call

inline void barrier_init(Barrier *barrier, unsigned arrivals) {
    if (arrivals - 1 >= (1 << 20) - 1) cuda_on_cpu::stop("barrier_init with %u arrivals, not 1 to 2^20 - 1", arrivals);
    cuda_on_cpu::Phase now = {arrivals, arrivals, 0, 0, 1};
    memcpy(barrier, &now, sizeof now);
}
inline void barrier_init_fence(void) {}
inline void barrier_expect(Barrier *barrier, unsigned bytes) {
    cuda_on_cpu::hopper().arrive(barrier, bytes);
    cuda_on_cpu::let_others_run();
}
inline void barrier_arrive(Barrier *barrier) { barrier_expect(barrier, 0); }
__noinline__ inline void barrier_wait(Barrier *barrier, unsigned parity) {
    cuda_on_cpu::Hopper &hopper = cuda_on_cpu::hopper();
    cuda_on_cpu::Fiber *me = cuda_on_cpu::self;
    while (hopper.phase(barrier).parity == parity) {
        hopper.waiters.push_back({barrier, me, parity});
        cuda_on_cpu::block_lane(me, &cuda_on_cpu::BARRIER_WAIT, 0);
        cuda_on_cpu::run_next(me);
    }
}

__noinline__ inline void named_barrier(int id, int threads, bool wait) {
    cuda_on_cpu::Fiber *me = cuda_on_cpu::self;
    if (id < 1 || id > 15 || threads < 32 || threads % 32) cuda_on_cpu::stop("named barrier %d for %d threads", id, threads);
    cuda_on_cpu::NamedBarrier &barrier = cuda_on_cpu::hopper().named[id];
    if (barrier.arrived && barrier.threads != (unsigned)threads)
        cuda_on_cpu::stop("named barrier %d for %d threads, but others came to it for %u", id, threads, barrier.threads);
    barrier.threads = (unsigned)threads;
    if (wait) {
        barrier.waiting.push_back(me);
        cuda_on_cpu::block_lane(me, &cuda_on_cpu::NAMED_BARRIER_SYNC, 0);
    }
    if (++barrier.arrived == barrier.threads) {
        for (cuda_on_cpu::Fiber *fiber : barrier.waiting) cuda_on_cpu::wake(fiber);
        barrier.waiting.clear();
        barrier.arrived = 0;
    }
    if (wait) cuda_on_cpu::run_next(me);
    else cuda_on_cpu::let_others_run();
}
inline void named_barrier_sync(int id, int threads) { named_barrier(id, threads, true); }
inline void named_barrier_arrive(int id, int threads) { named_barrier(id, threads, false); }

// What the driver refuses, too.
static inline bool tensor_map_make(TensorMap *map, const bf16 *tensor, int B, int T, int slots, int HS, int rows) {
    *map = {tensor, B, T, slots, HS, rows};
    const bool sizes = B > 0 && T > 0 && slots > 0 && HS > 0 && HS % 8 == 0 && rows > 0 && rows <= 256;
    if (sizes && tensor && (uintptr_t)tensor % 16 == 0) return true;
    return fail("no tensor map of a (%d, %d, %d, %d) tensor at %p by %d rows", B, T, slots, HS, (const void *)tensor, rows);
}

inline void tensor_load(void *to, const TensorMap *map, Barrier *barrier, int column, int row, int slot, int batch) {
    unsigned char *slab = (unsigned char *)to;
    cuda_on_cpu::start_transfer({*map, column, row, slot, batch, slab, map->rows * 128u, NULL, barrier}, 1024);
}
inline void bulk_load(void *to, const void *from, unsigned bytes, Barrier *barrier) {
    cuda_on_cpu::start_transfer({{}, 0, 0, 0, 0, (unsigned char *)to, bytes, from, barrier}, 16);
}
inline void tensor_store(const TensorMap *map, const void *from, int column, int row, int slot, int batch) {
    if (row < 0) cuda_on_cpu::stop("a store by a tensor map to row %d: GPUs do not take rows below 0", row);
    unsigned char *slab = (unsigned char *)from;
    const unsigned thread = cuda_on_cpu::thread_number(), group = cuda_on_cpu::hopper().threads[thread].stores;
    cuda_on_cpu::start_transfer({*map, column, row, slot, batch, slab, map->rows * 128u, NULL, NULL, thread, group, true}, 1024);
}
inline void bulk_store(void *to, const void *from, unsigned bytes, bool add = false) {
    const unsigned thread = cuda_on_cpu::thread_number(), group = cuda_on_cpu::hopper().threads[thread].stores;
    cuda_on_cpu::Transfer transfer = {{}, 0, 0, 0, 0, (unsigned char *)from, bytes, NULL, NULL, thread, group, true};
    transfer.to = to, transfer.add = add;
    cuda_on_cpu::start_transfer(transfer, 16);
}
inline void bulk_add(float *to, const float *from, unsigned bytes) { bulk_store(to, from, bytes, true); }
inline void store_commit(void) { cuda_on_cpu::hopper().threads[cuda_on_cpu::thread_number()].stores++; }
template <int N> inline void store_wait_read(void) { cuda_on_cpu::hopper().wait_for_stores(cuda_on_cpu::thread_number(), N, true); }
template <int N> inline void store_wait(void) { cuda_on_cpu::hopper().wait_for_stores(cuda_on_cpu::thread_number(), N, false); }
inline void fence_async(void) {}
inline void fence_async_global(void) {}

inline void stmatrix_x4(void *row, uint32_t r0, uint32_t r1, uint32_t r2, uint32_t r3) {
    cuda_on_cpu::Fiber *me = cuda_on_cpu::self;
    const uint32_t r[] = {r0, r1, r2, r3};
    cuda_on_cpu::check_aligned(row, "stmatrix");
    me->warp->in[me->lane] = (uintptr_t)row;
    cuda_on_cpu::meet_warp(&cuda_on_cpu::STMATRIX, UINT32_MAX);
    for (unsigned m = 0; m < 4; m++) memcpy((char *)me->warp->out[8 * m + me->lane / 4] + me->lane % 4 * 4, &r[m], 4);
}

template <int N> inline void registers_increase(void) {
    static_assert(N % 8 == 0 && N >= 24 && N <= 256, "so setmaxnreg");
    cuda_on_cpu::set_registers(N);
}
template <int N> inline void registers_decrease(void) { registers_increase<N>(); }
template <typename T, int N> inline void registers_settled(T (&)[N]) {}

// Shared memory's addresses are counted from the start of its dynamic part, where all slabs have to be.
inline uint64_t matrix_descriptor(const void *tile, unsigned leading_bytes, unsigned stride_bytes) {
    const cuda_on_cpu::Block *block = cuda_on_cpu::self->block;
    size_t offset = (size_t)((const unsigned char *)tile - block->dynamic_shared);
    if (offset >= block->launch->shared_bytes) cuda_on_cpu::stop("matrix_descriptor(%p): not in dynamic shared memory", tile);
    return (uint64_t)1 << 62 | (uint64_t)(stride_bytes >> 4) << 32 | (uint64_t)(leading_bytes >> 4) << 16 | offset >> 4;
}
inline void wgmma_fence(void) { cuda_on_cpu::hopper().threads[cuda_on_cpu::thread_number()].fenced = true; }
inline void wgmma_commit(void) { cuda_on_cpu::hopper().threads[cuda_on_cpu::thread_number()].products++; }
template <int N> inline void wgmma_wait(void) { cuda_on_cpu::wait_for_products(N); }

template <bool A_TRANSPOSED, bool B_TRANSPOSED, int HALF>
inline void wgmma(float (&d)[HALF], uint64_t a, uint64_t b, bool accumulate) {
    static_assert(HALF == 32 || HALF == 64, "gpt/hopper.cuh has N = 64 and 128");
    using namespace cuda_on_cpu;
    start_wgmma(d, 2 * HALF, a, NULL, b, A_TRANSPOSED * A_IS_TRANSPOSED | B_TRANSPOSED * B_IS_TRANSPOSED | accumulate * ACCUMULATE);
}
template <bool B_TRANSPOSED, int HALF>
inline void wgmma_registers(float (&d)[HALF], const uint32_t (&a)[4], uint64_t b, bool accumulate) {
    static_assert(HALF == 32 || HALF == 64, "gpt/hopper.cuh has N = 64 and 128");
    using namespace cuda_on_cpu;
    start_wgmma(d, 2 * HALF, 0, a, b, A_IN_REGISTERS | B_TRANSPOSED * B_IS_TRANSPOSED | accumulate * ACCUMULATE);
}

#endif
