// What host and kernels know of the pages of a batch, whatever the codec.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#define WIDE_PAGE 1u                      // flags of Status
#define BAD_FIELD 2u
#define BAD_RAW 4u

// One page of a batch (lynx_gpu/plan.py): where its tokens begin in the view, its shape, where its streams lie in the piece.
struct Job {
    int start, tokens, raw_head, raw_tail, fine, fine_at, reserved0, reserved1;
    i64 at[16];
};

// What the host learns of a page. `bad` is the complement of the least position of a value that is not finite, and the
// float32 bits of that value; 0 if there is none.
struct Status {
    u32 flags, exact_bytes;
    u64 bad;
};
