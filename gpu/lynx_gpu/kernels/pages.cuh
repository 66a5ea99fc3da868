// What encode.cu and decode.cu share: where things lie in a page, and its codec.
//   LYNX             1: the logarithmic codes of `lynx`; 0: even steps of `int8`, `int4` and `nested`
//   CHUNK            tokens that share their fields
//   STREAMS          streams of codes
//   STREAM_BITS      bits of a code in each of them, a comma between
//   HEADER           bytes of the page header
//   POINTS_AT        offset in the header of what codes of the first stream are read at, float16; 0: none
//   TOP              largest code, a float32

__device__ constexpr int bits_of_stream(int stream)
{
    constexpr int bits[] = {STREAM_BITS};
    return bits[stream];
}

// Bits below those of a stream.
__device__ constexpr int shift_of_stream(int stream)
{
    int shift = 0;
    for (int later = stream + 1; later < STREAMS; later++)
        shift += bits_of_stream(later);
    return shift;
}

// Byte offsets in stream 0 of a page.
struct Sections {
    int chunks, page_low, page_scale, chunk_low, chunk_scale, positions, data;
    int fine; // tokens whose rows of the later streams lie behind the codes

    __device__ Sections(const Job &job, bool wide)
    {
        const int first = job.raw_head, stop = job.tokens - job.raw_tail, meta = (wide ? 2 : 1) * CHANNELS;
        const bool coded = stop > first;
        chunks = coded ? (stop - 1) / CHUNK - first / CHUNK + 1 : 0;
        fine = STREAMS > 1 ? job.fine : 0;
        page_low = HEADER + 2 * (job.raw_head + job.raw_tail) * CHANNELS;
        page_scale = page_low + (coded ? 2 * CHANNELS : 0);
        chunk_low = page_scale + (coded ? 2 * CHANNELS : 0);
        chunk_scale = chunk_low + chunks * meta;
        positions = chunk_scale + chunks * meta;
        data = positions + 2 * fine;
    }

    // Where the fine rows of a later stream begin.
    __device__ int fine_rows(const Job &job, int stream) const
    {
        int at = data + (job.tokens - job.raw_head - job.raw_tail) * row_bytes(bits_of_stream(0));
        for (int earlier = 1; earlier < stream; earlier++)
            at += fine * row_bytes(bits_of_stream(earlier));
        return at;
    }
};

#define FEW_FINE 32 // positions of fine tokens that are counted one by one

// A u16 at any address.
struct Unaligned {
    u8 low, high;
    __device__ explicit operator int() const { return low | high << 8; }
};

// Row of a coded token in the later streams, or the complement of its place among the fine rows. `Position` is what the
// sorted positions of fine tokens are made of.
template <class Position> __device__ __forceinline__ int place_of(const Position *fine, int count, int token, int first)
{
    if (count <= FEW_FINE) { // reads that do not wait for one another
        int before = 0;
        bool found = false;
#pragma unroll 4
        for (int i = 0; i < count; i++) {
            const int position = (int)fine[i];
            before += position < token;
            found |= position == token;
        }
        return found ? ~before : token - first - before;
    }
    int low = 0, high = count;
    while (low < high) {
        const int middle = (low + high) / 2;
        if ((int)fine[middle] < token)
            low = middle + 1;
        else
            high = middle;
    }
    return low < count && (int)fine[low] == token ? ~low : token - first - low;
}

__device__ __forceinline__ u32 load16(const u8 *from)
{
    return ((u64)from & 1) == 0 ? *(const u16 *)from : from[0] | (u32)from[1] << 8;
}

__device__ __forceinline__ void store16(u8 *to, u32 value)
{
    if (((u64)to & 1) == 0) {
        *(u16 *)to = (u16)value;
    } else {
        to[0] = (u8)value;
        to[1] = (u8)(value >> 8);
    }
}

// Step of the grid of a channel with L levels.
__device__ __forceinline__ float step_of(float scale, float levels) { return __fdiv_rn(scale, levels); }
