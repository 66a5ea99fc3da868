/* What a lane's threads do for a whole burst without a Python object, in one call with the interpreter lock released:
 * checksums, headers, system calls. lynx_net/aio/lane_io.py holds the same in Python and says which of them is used.
 *
 * Frames are laid out as lynx_net/wire/frames.py says. xxh3-64 is the installed xxhash package's: its extension module
 * exports the C functions, which are looked up when this module is imported.
 */
#define _GNU_SOURCE
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030b0000
#include <Python.h>

#include <dlfcn.h>
#include <endian.h>
#include <errno.h>
#include <poll.h>
#include <stdint.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <time.h>

enum { HEADER_BYTES = 48, SUMMED_BYTES = 40, SEGMENT = 2 };
enum { MAX_IOV = 512 };
enum { PIECE_BYTES = 1024 * 1024 }; /* received at once: fewer wake-ups count for more than a warmer cache */
enum { LINGER_NS = 2000000 };      /* after this long a receive comes back with the payloads it has completed */

/* ---- xxh3-64 */

static uint64_t (*hash)(const void *, size_t);
static int (*hash_reset)(void *);
static int (*hash_update)(void *, const void *, size_t);
static uint64_t (*hash_digest)(const void *);
static void *(*hash_create)(void);
static int (*hash_free)(void *);

/* The variant that chooses its instructions when it runs, where there is one. */
static void *symbol(void *library, const char *fast, const char *plain)
{
    void *found = fast != NULL ? dlsym(library, fast) : NULL;
    if (found == NULL)
        found = dlsym(library, plain);
    if (found == NULL)
        PyErr_Format(PyExc_ImportError, "the xxhash package does not export %s", plain);
    return found;
}

static int load_hash(void)
{
    PyObject *package = PyImport_ImportModule("xxhash._xxhash");
    if (package == NULL)
        return -1;
    PyObject *file = PyObject_GetAttrString(package, "__file__");
    Py_DECREF(package);
    PyObject *path = NULL;
    if (file == NULL || !PyUnicode_FSConverter(file, &path)) {
        Py_XDECREF(file);
        return -1;
    }
    Py_DECREF(file);
    void *library = dlopen(PyBytes_AsString(path), RTLD_NOW | RTLD_LOCAL); /* never closed: its functions are used */
    Py_DECREF(path);
    if (library == NULL) {
        PyErr_Format(PyExc_ImportError, "the extension of the xxhash package cannot be opened: %s", dlerror());
        return -1;
    }
    if (!(hash = symbol(library, "XXH3_64bits_dispatch", "XXH3_64bits"))
        || !(hash_update = symbol(library, "XXH3_64bits_update_dispatch", "XXH3_64bits_update"))
        || !(hash_reset = symbol(library, NULL, "XXH3_64bits_reset"))
        || !(hash_digest = symbol(library, NULL, "XXH3_64bits_digest"))
        || !(hash_create = symbol(library, NULL, "XXH3_createState"))
        || !(hash_free = symbol(library, NULL, "XXH3_freeState")))
        return -1;
    return 0;
}

/* ---- sending */

typedef struct {
    Py_buffer view;
    int is_segment;
    uint64_t transfer;
    uint32_t page, stream, offset, stream_bytes;
} Item;

static int read_number(PyObject *tuple, Py_ssize_t index, uint64_t most, uint64_t *number)
{
    PyObject *item = PyTuple_GetItem(tuple, index);
    if (item == NULL)
        return -1;
    *number = PyLong_AsUnsignedLongLong(item);
    if (*number == UINT64_MAX && PyErr_Occurred())
        return -1;
    if (*number > most) {
        PyErr_SetString(PyExc_OverflowError, "a field of a segment does not fit into its header");
        return -1;
    }
    return 0;
}

/* Takes the buffer last, so that a failed item holds nothing. */
static int read_item(PyObject *tuple, Item *item)
{
    if (tuple == NULL || !PyTuple_Check(tuple) || PyTuple_Size(tuple) != 6) {
        if (!PyErr_Occurred())
            PyErr_SetString(PyExc_TypeError, "a batch is a list of SendBytes");
        return -1;
    }
    item->is_segment = PyTuple_GetItem(tuple, 1) != Py_None;
    if (item->is_segment) {
        uint64_t page, stream, offset, stream_bytes;
        if (read_number(tuple, 1, UINT64_MAX, &item->transfer) < 0 || read_number(tuple, 2, UINT32_MAX, &page) < 0
            || read_number(tuple, 3, UINT8_MAX, &stream) < 0 || read_number(tuple, 4, UINT32_MAX, &offset) < 0
            || read_number(tuple, 5, UINT32_MAX, &stream_bytes) < 0)
            return -1;
        item->page = (uint32_t)page;
        item->stream = (uint32_t)stream;
        item->offset = (uint32_t)offset;
        item->stream_bytes = (uint32_t)stream_bytes;
    }
    if (PyObject_GetBuffer(PyTuple_GetItem(tuple, 0), &item->view, PyBUF_SIMPLE) < 0)
        return -1;
    if (item->is_segment && (uint64_t)item->view.len > UINT32_MAX) {
        PyBuffer_Release(&item->view);
        PyErr_SetString(PyExc_OverflowError, "a segment is longer than its header can say");
        return -1;
    }
    return 0;
}

static void put16(unsigned char *to, uint16_t value)
{
    value = htole16(value);
    memcpy(to, &value, sizeof value);
}

static void put32(unsigned char *to, uint32_t value)
{
    value = htole32(value);
    memcpy(to, &value, sizeof value);
}

static void put64(unsigned char *to, uint64_t value)
{
    value = htole64(value);
    memcpy(to, &value, sizeof value);
}

static void pack_header(unsigned char *to, const Item *item, Py_ssize_t following)
{
    to[0] = SEGMENT;
    to[1] = (unsigned char)item->stream;
    put16(to + 2, (uint16_t)following);
    put32(to + 4, (uint32_t)item->view.len);
    put64(to + 8, item->transfer);
    put32(to + 16, item->page);
    put32(to + 20, item->offset);
    put32(to + 24, item->stream_bytes);
    put32(to + 28, 0);
    put64(to + 32, hash(item->view.buf, (size_t)item->view.len));
    put64(to + 40, hash(to, SUMMED_BYTES));
}

static int check_signals(PyThreadState **state)
{
    PyEval_RestoreThread(*state);
    int failed = PyErr_CheckSignals();
    *state = PyEval_SaveThread();
    return failed;
}

/* Send everything; 0, or -1 with errno or a Python exception set. Called without the interpreter lock. */
static int send_all(int fd, struct iovec *iov, size_t count, PyThreadState **state)
{
    while (count) {
        struct msghdr message = {.msg_iov = iov, .msg_iovlen = count < MAX_IOV ? count : MAX_IOV};
        size_t wanted = 0;
        for (size_t index = 0; index < message.msg_iovlen; index++)
            wanted += iov[index].iov_len;
        ssize_t sent = wanted ? sendmsg(fd, &message, MSG_NOSIGNAL) : 0;
        if (sent < 0 && errno != EINTR)
            return -1; /* EAGAIN too: the socket is not a blocking one, and to try again would spin */
        /* A blocking socket takes less than everything only when a signal comes. */
        if ((sent < 0 || (size_t)sent < wanted) && check_signals(state) < 0)
            return -1;
        size_t left = sent < 0 ? 0 : (size_t)sent;
        while (count && left >= iov->iov_len) {
            left -= iov->iov_len;
            iov++, count--;
        }
        if (left) {
            iov->iov_base = (char *)iov->iov_base + left;
            iov->iov_len -= left;
        }
    }
    return 0;
}

/* Hash, pack and send burst by burst: a payload is sent while it is in the cache. Called without the lock. */
static int send_items(int fd, const Item *items, Py_ssize_t count, Py_ssize_t max_burst, Py_ssize_t burst_bytes,
                      unsigned char *headers, struct iovec *iov, PyThreadState **state)
{
    size_t filled = 0;
    Py_ssize_t waiting_bytes = 0;
    for (Py_ssize_t at = 0; at < count;) {
        if (!items[at].is_segment) {
            iov[filled++] = (struct iovec){items[at].view.buf, (size_t)items[at].view.len};
            waiting_bytes += items[at++].view.len;
        } else {
            Py_ssize_t end = at, bytes = 0;
            while (end < count && items[end].is_segment && end - at < max_burst && bytes < burst_bytes)
                bytes += items[end++].view.len;
            iov[filled++] = (struct iovec){headers, (size_t)(end - at) * HEADER_BYTES};
            waiting_bytes += bytes;
            for (; at < end; at++, headers += HEADER_BYTES) {
                pack_header(headers, &items[at], end - 1 - at);
                iov[filled++] = (struct iovec){items[at].view.buf, (size_t)items[at].view.len};
            }
        }
        if (waiting_bytes >= burst_bytes || at == count) {
            if (send_all(fd, iov, filled, state) < 0)
                return -1;
            filled = 0;
            waiting_bytes = 0;
        }
    }
    return 0;
}

PyDoc_STRVAR(send_doc, "send(fd, batch, max_burst, burst_bytes)\n--\n\n"
                       "Put a list of SendBytes on a blocking socket, as the buffers of seal().");

static PyObject *lanes_send(PyObject *module, PyObject *args)
{
    int fd;
    PyObject *batch;
    Py_ssize_t max_burst, burst_bytes, taken = 0;
    if (!PyArg_ParseTuple(args, "iOnn:send", &fd, &batch, &max_burst, &burst_bytes))
        return NULL;
    if (!PyList_Check(batch)) {
        PyErr_SetString(PyExc_TypeError, "a batch is a list of SendBytes");
        return NULL;
    }
    if (max_burst < 1 || max_burst > UINT16_MAX || burst_bytes < 1) {
        PyErr_SetString(PyExc_ValueError, "a burst has 1 to 65535 segments and at least a byte");
        return NULL;
    }
    Py_ssize_t count = PyList_Size(batch);
    Item *items = PyMem_Calloc((size_t)count + 1, sizeof *items);
    struct iovec *iov = PyMem_Calloc((size_t)count + 1, 2 * sizeof *iov);
    unsigned char *headers = PyMem_Calloc((size_t)count + 1, HEADER_BYTES);
    PyObject *result = NULL;
    if (items == NULL || iov == NULL || headers == NULL) {
        PyErr_NoMemory();
        goto done;
    }
    for (; taken < count; taken++)
        if (read_item(PyList_GetItem(batch, taken), &items[taken]) < 0)
            goto done;
    PyThreadState *state = PyEval_SaveThread();
    int failed = send_items(fd, items, count, max_burst, burst_bytes, headers, iov, &state);
    int error = errno;
    PyEval_RestoreThread(state);
    if (!failed) {
        result = Py_NewRef(Py_None);
    } else if (!PyErr_Occurred()) {
        errno = error;
        PyErr_SetFromErrno(PyExc_OSError);
    }
done:
    while (taken > 0)
        PyBuffer_Release(&items[--taken].view);
    PyMem_Free(items);
    PyMem_Free(iov);
    PyMem_Free(headers);
    return result;
}

/* ---- receiving */

typedef struct {
    Py_buffer *views; /* the payloads, then the tail, then what may follow that */
    Py_ssize_t count; /* payloads */
    uint64_t *sums;
    Py_ssize_t done;   /* payloads that are full */
    Py_ssize_t filled; /* bytes of the next */
    void *running;     /* hash of the next, if it comes in pieces */
} Receiving;

static int64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

/* Hash `got` bytes that arrived, payload by payload; an empty payload is full when its turn comes. */
static void account(Receiving *one, Py_ssize_t got)
{
    while (one->done < one->count) {
        const Py_buffer *view = &one->views[one->done];
        Py_ssize_t taken = view->len - one->filled < got ? view->len - one->filled : got;
        const char *begin = (const char *)view->buf + one->filled;
        if (view->len == taken) {
            one->sums[one->done] = hash(begin, (size_t)taken);
        } else {
            if (one->filled == 0)
                hash_reset(one->running);
            hash_update(one->running, begin, (size_t)taken);
            if (one->filled + taken == view->len)
                one->sums[one->done] = hash_digest(one->running);
        }
        one->filled += taken;
        got -= taken;
        if (one->filled < view->len)
            return;
        one->done++;
        one->filled = 0;
    }
}

/* Receive a piece of the payloads, waiting for all of it. Returns what recvmsg does, and what was wanted. */
static ssize_t receive_piece(int fd, const Receiving *one, Py_ssize_t *wanted)
{
    struct iovec iov[MAX_IOV];
    size_t used = 0;
    Py_ssize_t offset = one->filled;
    *wanted = 0;
    for (Py_ssize_t next = one->done; next < one->count && used < MAX_IOV && *wanted < PIECE_BYTES; next++) {
        Py_ssize_t length = one->views[next].len - offset, room = PIECE_BYTES - *wanted;
        /* A last piece that would be small comes along. */
        if (length > room + PIECE_BYTES / 4)
            length = room;
        iov[used++] = (struct iovec){(char *)one->views[next].buf + offset, (size_t)length};
        *wanted += length;
        offset = 0;
    }
    struct msghdr message = {.msg_iov = iov, .msg_iovlen = used};
    return recvmsg(fd, &message, MSG_WAITALL);
}

/* The tail as far as it is there; waits for its first byte if nothing came before. Returns as recv does. */
static ssize_t receive_tail(int fd, const Receiving *one, ssize_t before, int wait_ms)
{
    const Py_buffer *tail = &one->views[one->count];
    ssize_t got = recv(fd, tail->buf, (size_t)tail->len, MSG_DONTWAIT);
    if (got >= 0 || before || (errno != EAGAIN && errno != EWOULDBLOCK))
        return got;
    /* Not in recv itself: the kernel wakes that for every byte that is sent on the socket, too. */
    struct pollfd readable = {.fd = fd, .events = POLLIN};
    int ready = poll(&readable, 1, wait_ms);
    if (ready < 0)
        return -1;
    if (ready == 0) {
        errno = EAGAIN;
        return -1;
    }
    return recv(fd, tail->buf, (size_t)tail->len, MSG_DONTWAIT);
}

/* The tail is a whole header: of those that it says follow, what is there. The bytes received, 0 also for an error,
 * which the next receive finds again. Nothing is believed here: the reader checks every header. */
static ssize_t receive_headers(int fd, const Receiving *one)
{
    const unsigned char *header = one->views[one->count].buf;
    const Py_buffer *more = &one->views[one->count + 1];
    uint16_t following;
    memcpy(&following, header + 2, sizeof following);
    Py_ssize_t wanted = (Py_ssize_t)le16toh(following) * HEADER_BYTES;
    if (header[0] != SEGMENT || wanted == 0 || more->len == 0)
        return 0;
    ssize_t got = recv(fd, more->buf, (size_t)(wanted < more->len ? wanted : more->len), MSG_DONTWAIT);
    return got < 0 ? 0 : got;
}

/* Payloads, then the tail as far as it is there. Bytes received, 0 at the end of the stream, -1 with errno: EINTR and
 * EAGAIN if nothing came. An error after bytes is left for the next call, which sees a closed stream at least. */
static ssize_t receive_all(int fd, Receiving *one, int wait_ms)
{
    ssize_t total = 0, got;
    int64_t began = now_ns();
    account(one, 0);
    while (one->done < one->count) {
        Py_ssize_t wanted, done = one->done;
        got = receive_piece(fd, one, &wanted);
        if (got <= 0)
            return total ? total : got;
        account(one, got);
        total += got;
        if (got < wanted)
            return total;
        int64_t spent = now_ns() - began;
        if (one->done < one->count && spent > (one->done > done ? LINGER_NS : (int64_t)wait_ms * 1000000))
            return total;
    }
    Py_ssize_t tail_bytes = one->views[one->count].len;
    if (tail_bytes == 0)
        return total;
    got = receive_tail(fd, one, total, wait_ms);
    if (got <= 0)
        return total ? total : got;
    total += got;
    return got == HEADER_BYTES && tail_bytes == HEADER_BYTES ? total + receive_headers(fd, one) : total;
}

PyDoc_STRVAR(receive_doc, "receive(fd, payloads, tail, more, wait_s)\n--\n\n"
                          "Fill writable buffers; returns the bytes received and the xxh3-64 of each full payload.");

static PyObject *sums_list(const Receiving *one)
{
    PyObject *sums = PyList_New(one->done);
    for (Py_ssize_t index = 0; sums != NULL && index < one->done; index++) {
        PyObject *number = PyLong_FromUnsignedLongLong(one->sums[index]);
        if (number == NULL || PyList_SetItem(sums, index, number) < 0)
            Py_CLEAR(sums);
    }
    return sums;
}

static PyObject *lanes_receive(PyObject *module, PyObject *args)
{
    int fd;
    PyObject *payloads, *tail, *more;
    double wait_s;
    Py_ssize_t taken = 0;
    if (!PyArg_ParseTuple(args, "iOOOd:receive", &fd, &payloads, &tail, &more, &wait_s))
        return NULL;
    if (!PyList_Check(payloads)) {
        PyErr_SetString(PyExc_TypeError, "payloads is a list of writable buffers");
        return NULL;
    }
    if (!(wait_s >= 0 && wait_s < 1e6)) {
        PyErr_SetString(PyExc_ValueError, "wait_s is out of range");
        return NULL;
    }
    Receiving one = {.count = PyList_Size(payloads)};
    one.views = PyMem_Calloc((size_t)one.count + 2, sizeof *one.views);
    one.sums = PyMem_Calloc((size_t)one.count + 1, sizeof *one.sums);
    PyObject *result = NULL;
    if (one.views == NULL || one.sums == NULL) {
        PyErr_NoMemory();
        goto done;
    }
    for (; taken < one.count + 2; taken++) {
        PyObject *buffer = taken < one.count ? PyList_GetItem(payloads, taken) : taken == one.count ? tail : more;
        if (buffer == NULL || PyObject_GetBuffer(buffer, &one.views[taken], PyBUF_WRITABLE) < 0)
            goto done;
    }
    if (one.count && (one.running = hash_create()) == NULL) {
        PyErr_NoMemory();
        goto done;
    }
    ssize_t total;
    for (;;) {
        PyThreadState *state = PyEval_SaveThread();
        total = receive_all(fd, &one, (int)(wait_s * 1000));
        int error = errno;
        PyEval_RestoreThread(state);
        if (total >= 0)
            break;
        if (error != EINTR) {
            errno = error;
            PyErr_SetFromErrno(PyExc_OSError);
            goto done;
        }
        if (PyErr_CheckSignals() < 0)
            goto done;
    }
    PyObject *sums = sums_list(&one);
    if (sums != NULL)
        result = Py_BuildValue("nN", (Py_ssize_t)total, sums);
done:
    if (one.running != NULL)
        hash_free(one.running);
    while (taken > 0)
        PyBuffer_Release(&one.views[--taken]);
    PyMem_Free(one.views);
    PyMem_Free(one.sums);
    return result;
}

/* ---- the module */

static int lanes_exec(PyObject *module)
{
    return load_hash();
}

static PyMethodDef methods[] = {
    {"send", lanes_send, METH_VARARGS, send_doc},
    {"receive", lanes_receive, METH_VARARGS, receive_doc},
    {NULL, NULL, 0, NULL},
};

static PyModuleDef_Slot slots[] = {{Py_mod_exec, lanes_exec}, {0, NULL}};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "lynx_net.aio._lanes",
    .m_doc = "Bursts over sockets without the interpreter lock.",
    .m_methods = methods,
    .m_slots = slots,
};

PyMODINIT_FUNC PyInit__lanes(void)
{
    return PyModuleDef_Init(&definition);
}
