/* Receiving payloads whose places Python names, and what that shares with _lanes_reader.c. */
#include "_lanes.h"

#include <poll.h>
#include <time.h>

enum { PIECE_BYTES = 1024 * 1024 }; /* received at once: fewer wake-ups count for more than a warmer cache */

int64_t lanes_now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

/* Hash `got` bytes that arrived, payload by payload; an empty payload is full when its turn comes. */
void lanes_account(Receiving *one, size_t got)
{
    while (one->done < one->count) {
        const struct iovec *payload = &one->payloads[one->done];
        size_t taken = payload->iov_len - one->filled < got ? payload->iov_len - one->filled : got;
        const char *begin = (const char *)payload->iov_base + one->filled;
        if (payload->iov_len == taken) {
            one->sums[one->done] = lanes_hash(begin, taken);
        } else {
            if (one->filled == 0)
                lanes_hash_reset(one->running);
            lanes_hash_update(one->running, begin, taken);
            if (one->filled + taken == payload->iov_len)
                one->sums[one->done] = lanes_hash_digest(one->running);
        }
        one->filled += taken;
        got -= taken;
        if (one->filled < payload->iov_len)
            return;
        one->done++;
        one->filled = 0;
    }
}

/* Receive up to `most` bytes of the payloads, waiting for all of them. Returns what recvmsg does, and what was wanted. */
ssize_t lanes_receive_piece(int fd, const Receiving *one, size_t most, size_t *wanted)
{
    struct iovec iov[MAX_IOV];
    size_t used = 0, offset = one->filled;
    *wanted = 0;
    for (size_t next = one->done; next < one->count && used < MAX_IOV && *wanted < most; next++) {
        size_t length = one->payloads[next].iov_len - offset, room = most - *wanted;
        /* A last piece that would be small comes along. */
        if (length > room + most / 4)
            length = room;
        iov[used++] = (struct iovec){(char *)one->payloads[next].iov_base + offset, length};
        *wanted += length;
        offset = 0;
    }
    struct msghdr message = {.msg_iov = iov, .msg_iovlen = used};
    return recvmsg(fd, &message, MSG_WAITALL);
}

/* What is there, up to `bytes`; waits for the first byte, unless `wait_ns` is 0. Returns as recv does. */
ssize_t lanes_receive_or_wait(int fd, void *to, size_t bytes, int64_t wait_ns)
{
    ssize_t got = recv(fd, to, bytes, MSG_DONTWAIT);
    if (got >= 0 || wait_ns <= 0 || (errno != EAGAIN && errno != EWOULDBLOCK))
        return got;
    /* Not in recv itself: the kernel wakes that for every byte that is sent on the socket, too. */
    struct pollfd readable = {.fd = fd, .events = POLLIN};
    struct timespec wait = {.tv_sec = wait_ns / 1000000000, .tv_nsec = wait_ns % 1000000000};
    int ready = ppoll(&readable, 1, &wait, NULL);
    if (ready < 0)
        return -1;
    if (ready == 0) {
        errno = EAGAIN;
        return -1;
    }
    return recv(fd, to, bytes, MSG_DONTWAIT);
}

/* The tail is a whole header: of those that it says follow, what is there. The bytes received, 0 also for an error,
 * which the next receive finds again. Nothing is believed here: the reader checks every header. */
static ssize_t receive_headers(int fd, const unsigned char *header, const Py_buffer *more)
{
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
static ssize_t receive_all(int fd, Receiving *one, const Py_buffer *tail, const Py_buffer *more, int64_t wait_ns)
{
    ssize_t total = 0, got;
    int64_t began = lanes_now_ns();
    lanes_account(one, 0);
    while (one->done < one->count) {
        size_t wanted, done = one->done;
        got = lanes_receive_piece(fd, one, PIECE_BYTES, &wanted);
        if (got <= 0)
            return total ? total : got;
        lanes_account(one, (size_t)got);
        total += got;
        if ((size_t)got < wanted)
            return total;
        int64_t spent = lanes_now_ns() - began;
        if (one->done < one->count && spent > (one->done > done ? LINGER_NS : wait_ns))
            return total;
    }
    if (tail->len == 0)
        return total;
    got = lanes_receive_or_wait(fd, tail->buf, (size_t)tail->len, total ? 0 : wait_ns);
    if (got <= 0)
        return total ? total : got;
    total += got;
    return got == HEADER_BYTES && tail->len == HEADER_BYTES ? total + receive_headers(fd, tail->buf, more) : total;
}

static PyObject *sums_list(const Receiving *one)
{
    PyObject *sums = PyList_New((Py_ssize_t)one->done);
    for (size_t index = 0; sums != NULL && index < one->done; index++) {
        PyObject *number = PyLong_FromUnsignedLongLong(one->sums[index]);
        if (number == NULL || PyList_SetItem(sums, (Py_ssize_t)index, number) < 0)
            Py_CLEAR(sums);
    }
    return sums;
}

PyDoc_STRVAR(receive_doc, "receive(fd, payloads, tail, more, wait_s)\n--\n\n"
                          "Fill writable buffers; returns the bytes received and the xxh3-64 of each full payload.");

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
    Py_ssize_t count = PyList_Size(payloads);
    Receiving one = {.count = (size_t)count};
    Py_buffer *views = PyMem_Calloc((size_t)count + 2, sizeof *views); /* the payloads, the tail, what may follow it */
    one.payloads = PyMem_Calloc((size_t)count + 1, sizeof *one.payloads);
    one.sums = PyMem_Calloc((size_t)count + 1, sizeof *one.sums);
    PyObject *result = NULL;
    if (views == NULL || one.payloads == NULL || one.sums == NULL) {
        PyErr_NoMemory();
        goto done;
    }
    for (; taken < count + 2; taken++) {
        PyObject *buffer = taken < count ? PyList_GetItem(payloads, taken) : taken == count ? tail : more;
        if (buffer == NULL || PyObject_GetBuffer(buffer, &views[taken], PyBUF_WRITABLE) < 0)
            goto done;
        if (taken < count)
            one.payloads[taken] = (struct iovec){views[taken].buf, (size_t)views[taken].len};
    }
    if (count && (one.running = lanes_hash_create()) == NULL) {
        PyErr_NoMemory();
        goto done;
    }
    ssize_t total;
    for (;;) {
        PyThreadState *state = PyEval_SaveThread();
        total = receive_all(fd, &one, &views[count], &views[count + 1], (int64_t)(wait_s * 1e9));
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
        lanes_hash_free(one.running);
    while (taken > 0)
        PyBuffer_Release(&views[--taken]);
    PyMem_Free(views);
    PyMem_Free(one.payloads);
    PyMem_Free(one.sums);
    return result;
}

PyMethodDef lanes_receive_methods[] = {
    {"receive", lanes_receive, METH_VARARGS, receive_doc},
    {NULL, NULL, 0, NULL},
};
