/* What a lane's threads do for a whole burst without a Python object, in one call with the interpreter lock released:
 * checksums, headers, system calls. lynx_net/aio/lane_io.py holds the same in Python and says which of them is used.
 *
 * Frames are laid out as lynx_net/wire/frames.py says. xxh3-64 is the installed xxhash package's: its extension module
 * exports the C functions, which are looked up when this module is imported. _lanes_receive.c receives what Python has made
 * places for; _lanes_reader.c makes them itself, of buffers that Python has lent (_lanes_stock.c).
 */
#include "_lanes.h"

#include <dlfcn.h>

/* ---- xxh3-64 */

uint64_t (*lanes_hash)(const void *, size_t);
int (*lanes_hash_reset)(void *);
int (*lanes_hash_update)(void *, const void *, size_t);
uint64_t (*lanes_hash_digest)(const void *);
void *(*lanes_hash_create)(void);
int (*lanes_hash_free)(void *);

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
    if (!(lanes_hash = symbol(library, "XXH3_64bits_dispatch", "XXH3_64bits"))
        || !(lanes_hash_update = symbol(library, "XXH3_64bits_update_dispatch", "XXH3_64bits_update"))
        || !(lanes_hash_reset = symbol(library, NULL, "XXH3_64bits_reset"))
        || !(lanes_hash_digest = symbol(library, NULL, "XXH3_64bits_digest"))
        || !(lanes_hash_create = symbol(library, NULL, "XXH3_createState"))
        || !(lanes_hash_free = symbol(library, NULL, "XXH3_freeState")))
        return -1;
    return 0;
}

/* ---- sending */

typedef struct {
    Py_buffer view;
    int is_segment, is_summed;
    uint64_t transfer, checksum;
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
    if (tuple == NULL || !PyTuple_Check(tuple) || PyTuple_Size(tuple) != 7) {
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
        item->is_summed = PyTuple_GetItem(tuple, 6) != Py_None;
        if (item->is_summed && read_number(tuple, 6, UINT64_MAX, &item->checksum) < 0)
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

enum { CHUNK_BYTES = 2048, AHEAD_BYTES = 4 * CHUNK_BYTES, LINE_BYTES = 64 };

/* Into the first cache, which holds four times as much as is fetched ahead. */
static void fetch(const char *from, size_t bytes)
{
    for (size_t at = 0; at < bytes; at += LINE_BYTES)
        __builtin_prefetch(from + at);
}

/* lanes_hash of what is probably in no cache near: the hash alone waits for memory most of the time, since it looks less
 * far ahead than memory is away. What comes next is fetched meanwhile. */
static uint64_t hash_cold(void *running, const char *payload, size_t bytes)
{
    if (bytes < 2 * AHEAD_BYTES)
        return lanes_hash(payload, bytes);
    lanes_hash_reset(running);
    fetch(payload, AHEAD_BYTES);
    for (size_t at = 0, length; at < bytes; at += length) {
        length = bytes - at < CHUNK_BYTES ? bytes - at : CHUNK_BYTES;
        if (at + AHEAD_BYTES + length <= bytes)
            fetch(payload + at + AHEAD_BYTES, length);
        lanes_hash_update(running, payload + at, length);
    }
    return lanes_hash_digest(running);
}

static void pack_header(unsigned char *to, const Item *item, Py_ssize_t following, uint32_t flags, void *running)
{
    to[0] = SEGMENT;
    to[1] = (unsigned char)item->stream;
    put16(to + 2, (uint16_t)following);
    put32(to + 4, (uint32_t)item->view.len);
    put64(to + 8, item->transfer);
    put32(to + 16, item->page);
    put32(to + 20, item->offset);
    put32(to + 24, item->stream_bytes);
    put32(to + 28, flags);
    put64(to + 32, item->is_summed ? item->checksum : hash_cold(running, item->view.buf, (size_t)item->view.len));
    put64(to + 40, lanes_hash(to, SUMMED_BYTES));
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

/* Hash, pack and send burst by burst: a payload is sent while it is in the cache. The last header has `last_flags`. Called
 * without the lock. Returns how many items were sent: fewer than all, but `must` at least, if `stop` was set between two of
 * them; -1 as send_all. */
static Py_ssize_t send_items(int fd, const Item *items, Py_ssize_t count, Py_ssize_t max_burst, Py_ssize_t burst_bytes,
                             Py_ssize_t must, const unsigned char *stop, uint32_t last_flags, unsigned char *headers,
                             struct iovec *iov, void *running, PyThreadState **state)
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
                pack_header(headers, &items[at], end - 1 - at, at == count - 1 ? last_flags : 0, running);
                iov[filled++] = (struct iovec){items[at].view.buf, (size_t)items[at].view.len};
            }
        }
        if (waiting_bytes >= burst_bytes || at == count) {
            if (send_all(fd, iov, filled, state) < 0)
                return -1;
            filled = 0;
            waiting_bytes = 0;
            if (at >= must && __atomic_load_n(stop, __ATOMIC_RELAXED))
                return at;
        }
    }
    return count;
}

PyDoc_STRVAR(send_doc, "send(fd, batch, max_burst, burst_bytes, must, stop, last)\n--\n\n"
                       "Put a list of SendBytes on a blocking socket, as the buffers of seal(); returns how many.\n\n"
                       "They are not all, but the first `must` at least, if the byte `stop` is not 0 meanwhile. `last` is\n"
                       "of the header of the last.");

static PyObject *lanes_send(PyObject *module, PyObject *args)
{
    int fd;
    PyObject *batch;
    Py_ssize_t max_burst, burst_bytes, must, taken = 0;
    Py_buffer stop;
    int last;
    if (!PyArg_ParseTuple(args, "iOnnny*p:send", &fd, &batch, &max_burst, &burst_bytes, &must, &stop, &last))
        return NULL;
    PyObject *result = NULL;
    Item *items = NULL;
    struct iovec *iov = NULL;
    unsigned char *headers = NULL;
    void *running = NULL; /* a hash */
    if (!PyList_Check(batch)) {
        PyErr_SetString(PyExc_TypeError, "a batch is a list of SendBytes");
        goto done;
    }
    if (max_burst < 1 || max_burst > UINT16_MAX || burst_bytes < 1) {
        PyErr_SetString(PyExc_ValueError, "a burst has 1 to 65535 segments and at least a byte");
        goto done;
    }
    if (stop.len != 1) {
        PyErr_SetString(PyExc_ValueError, "stop is one byte");
        goto done;
    }
    Py_ssize_t count = PyList_Size(batch);
    items = PyMem_Calloc((size_t)count + 1, sizeof *items);
    iov = PyMem_Calloc((size_t)count + 1, 2 * sizeof *iov);
    headers = PyMem_Calloc((size_t)count + 1, HEADER_BYTES);
    running = lanes_hash_create();
    if (items == NULL || iov == NULL || headers == NULL || running == NULL) {
        PyErr_NoMemory();
        goto done;
    }
    for (; taken < count; taken++)
        if (read_item(PyList_GetItem(batch, taken), &items[taken]) < 0)
            goto done;
    PyThreadState *state = PyEval_SaveThread();
    Py_ssize_t sent = send_items(fd, items, count, max_burst, burst_bytes, must, stop.buf, last ? LAST : 0, headers,
                                 iov, running, &state);
    int error = errno;
    PyEval_RestoreThread(state);
    if (sent >= 0) {
        result = PyLong_FromSsize_t(sent);
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
    if (running != NULL)
        lanes_hash_free(running);
    PyBuffer_Release(&stop);
    return result;
}

/* ---- the module */

static int lanes_exec(PyObject *module)
{
    if (load_hash() < 0 || PyModule_AddFunctions(module, lanes_receive_methods) < 0)
        return -1;
    return lanes_add_stock(module);
}

static PyMethodDef methods[] = {
    {"send", lanes_send, METH_VARARGS, send_doc},
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
