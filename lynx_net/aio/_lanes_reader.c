/* Receiving whole streams of pages into buffers that Python has lent, many in one call, without the interpreter.
 *
 * A reader takes the segments of one connection as long as each of them is a whole stream of a page for which the stock
 * has a buffer. Nothing is decided here: Python checks every header and every sum afterwards (lynx_net/wire/lending.py),
 * and gets the headers of all that is not so simple to read them itself.
 */
#include "_lanes_stock.h"

enum { MAX_BURST = 256 }; /* segments whose headers may come before their payloads, as in frames.py */
enum { LEAST_PIECE = 1 << 16, MOST_PIECE = 1 << 18 };
enum { MOST_PAUSE_NS = 300000 };
enum { TELL_NS = 3000000, TELL_MIXED_NS = 500000 }; /* Python hears of a full page after so long, or of several streams */

typedef struct {
    PyObject_HEAD
    PyObject *stock;
    size_t lane;
    Receiving burst; /* its payloads are those of `coming` */
    Segment coming[MAX_BURST];
    struct iovec payloads[MAX_BURST];
    uint64_t sums[MAX_BURST];
    size_t taken; /* of the burst, those that the stock has */
    unsigned char headers[MAX_BURST * HEADER_BYTES];
    size_t headers_filled, headers_wanted;
    int refused; /* the headers are for Python */
    size_t piece_bytes;
    int64_t burst_began_ns;
    int64_t pause_ns; /* so long a next burst is awaited before Python is told of what is full */
} Reader;

static uint32_t get32(const unsigned char *from)
{
    uint32_t value;
    memcpy(&value, from, sizeof value);
    return le32toh(value);
}

static uint64_t get64(const unsigned char *from)
{
    uint64_t value;
    memcpy(&value, from, sizeof value);
    return le64toh(value);
}

static unsigned int get_following(const unsigned char *header)
{
    return header[2] | (unsigned int)header[3] << 8;
}

/* A whole stream of a page, in a header that is sound and says that so many follow; what it is to be in has to be seen. */
static int read_header(const unsigned char *header, size_t following, Segment *segment)
{
    uint32_t flags = get32(header + 28);
    if (header[0] != SEGMENT || get_following(header) != following || flags > (following ? 0 : LAST)
        || lanes_hash(header, SUMMED_BYTES) != get64(header + 40))
        return 0;
    *segment = (Segment){
        .transfer = get64(header + 8),
        .checksum = get64(header + 32),
        .page = get32(header + 16),
        .stream = header[1],
        .bytes = get32(header + 4),
        .last = flags == LAST,
    };
    return get32(header + 20) == 0 && get32(header + 24) == segment->bytes;
}

/* Buffers for all segments of the burst whose headers are there, or for none. */
static int claim(Reader *self, size_t count)
{
    Stock *stock = (Stock *)self->stock;
    size_t claimed = 0;
    pthread_mutex_lock(&stock->mutex);
    for (; claimed < count; claimed++) {
        Segment *segment = &self->coming[claimed];
        Shelf *shelf = lanes_find_shelf(stock, segment->transfer, segment->stream, segment->bytes);
        if (shelf == NULL)
            break;
        segment->together_bytes = shelf->together_bytes;
        segment->loan = lanes_pop(stock, shelf, self->lane);
    }
    int all = claimed == count;
    while (!all && claimed-- > 0) /* there is room: no shelf has been added meanwhile */
        lanes_push(stock, self->coming[claimed].transfer, self->coming[claimed].stream, self->coming[claimed].loan);
    pthread_mutex_unlock(&stock->mutex);
    return all;
}

/* All headers of a burst are there: make places for the payloads, or leave them to Python. */
static void begin_burst(Reader *self)
{
    size_t count = self->headers_filled / HEADER_BYTES, index = 0;
    while (index < count && read_header(self->headers + index * HEADER_BYTES, count - 1 - index, &self->coming[index]))
        index++;
    if (index < count || !claim(self, count)) {
        self->refused = 1;
        return;
    }
    for (index = 0; index < count; index++)
        self->payloads[index] = (struct iovec){self->coming[index].loan->view.buf, self->coming[index].bytes};
    self->burst.count = count;
    self->burst.done = self->burst.filled = self->taken = 0;
    lanes_account(&self->burst, 0); /* the first may be empty, or all */
    self->headers_filled = 0;
    self->headers_wanted = HEADER_BYTES;
    self->burst_began_ns = lanes_now_ns();
}

/* Bytes have come, some of which may have filled payloads: they are the stock's. A burst that is over is worth a pause as
 * long as it took, if more of its stream is expected and its sender has more: it hashes what it sends next, and is not done
 * with that when the receiver is; and to tell of every burst alone costs more than a burst. */
static void collect(Reader *self, size_t got)
{
    Stock *stock = (Stock *)self->stock;
    int64_t now = lanes_now_ns();
    pthread_mutex_lock(&stock->mutex);
    Count *untold = &stock->untold[self->lane];
    untold->bytes += got;
    for (; self->taken < self->burst.done; self->taken++) {
        Segment *segment = &stock->full[stock->full_count++];
        *segment = self->coming[self->taken];
        segment->sum = self->sums[self->taken];
        *lanes_home_of(stock, segment->loan->view.buf) = (Home){segment->loan->view.buf, self->lane % STACKS};
        untold->segments++;
        stock->full_bytes += segment->bytes;
        if (stock->full_count == 1)
            stock->full_since_ns = now;
        if (segment->stream != stock->full[0].stream)
            stock->mixed = 1;
        if (segment->together_bytes < stock->enough_bytes)
            stock->enough_bytes = segment->together_bytes;
    }
    if (self->burst.count && self->taken == self->burst.count) {
        const Segment *last = &self->coming[self->taken - 1];
        int more = lanes_find_shelf(stock, last->transfer, last->stream, last->bytes) != NULL;
        int64_t took_ns = now - self->burst_began_ns;
        self->pause_ns = !more || last->last ? 0 : took_ns < MOST_PAUSE_NS ? took_ns : MOST_PAUSE_NS;
        self->burst.count = self->burst.done = self->taken = 0;
    }
    pthread_mutex_unlock(&stock->mutex);
}

/* Whether this lane has filled something of which Python has not been told. */
static int has_untold(Reader *self)
{
    Stock *stock = (Stock *)self->stock;
    pthread_mutex_lock(&stock->mutex);
    int has = stock->untold[self->lane].segments != 0;
    pthread_mutex_unlock(&stock->mutex);
    return has;
}

/* Whether this reader is to go and tell Python of what all have filled. The teller is told of that, where there is one. */
static int is_to_tell(Reader *self)
{
    Stock *stock = (Stock *)self->stock;
    int64_t now = lanes_now_ns();
    pthread_mutex_lock(&stock->mutex);
    int64_t most_ns = stock->mixed ? TELL_MIXED_NS : TELL_NS;
    int is_due = stock->full_count
        && (stock->full_bytes >= stock->enough_bytes || now - stock->full_since_ns > most_ns)
        && now - stock->told_ns > most_ns; /* or another one is on its way, and not late */
    if (is_due)
        stock->told_ns = now;
    int goes = is_due && !stock->teller;
    if (is_due && stock->teller) {
        stock->due = 1;
        pthread_cond_signal(&stock->due_or_over);
    }
    pthread_mutex_unlock(&stock->mutex);
    return goes;
}

/* Let the teller tell Python of what is full; 0 where there is none. */
static int leave_to_teller(Stock *stock)
{
    pthread_mutex_lock(&stock->mutex);
    int is_there = stock->teller;
    if (is_there && stock->full_count) {
        stock->due = 1;
        pthread_cond_signal(&stock->due_or_over);
    }
    pthread_mutex_unlock(&stock->mutex);
    return is_there;
}

/* Headers as far as they are there. Returns as recv does. */
static ssize_t receive_headers(Reader *self, int fd, int64_t wait_ns)
{
    unsigned char *to = self->headers + self->headers_filled;
    ssize_t got = lanes_receive_or_wait(fd, to, self->headers_wanted - self->headers_filled, wait_ns);
    if (got <= 0)
        return got;
    self->headers_filled += (size_t)got;
    if (self->headers_filled == HEADER_BYTES && self->headers_wanted == HEADER_BYTES && self->headers[0] == SEGMENT) {
        unsigned int following = get_following(self->headers);
        self->headers_wanted += HEADER_BYTES * (following < MAX_BURST ? following : 0);
    }
    if (self->headers_filled == self->headers_wanted)
        begin_burst(self);
    return got;
}

/* Bytes received, 0 at the end of the stream, -1 with errno: EINTR and EAGAIN if nothing came. Comes back when Python is
 * to be told, also soon after nothing more is there: the last page before a pause is awaited. Where a teller does that,
 * this waits on. */
static ssize_t read_on(Reader *self, int fd, int64_t wait_ns)
{
    ssize_t total = 0, got;
    int is_told = 0;
    do {
        if (self->burst.count) {
            size_t wanted;
            got = lanes_receive_piece(fd, &self->burst, has_untold(self) ? self->piece_bytes : MOST_PIECE, &wanted);
            if (got > 0) {
                lanes_account(&self->burst, (size_t)got);
                collect(self, (size_t)got);
                if ((size_t)got < wanted)
                    return total + got;
            }
        } else {
            got = receive_headers(self, fd, has_untold(self) && !is_told ? self->pause_ns : wait_ns);
            if (got > 0)
                collect(self, (size_t)got);
            else if (got < 0 && errno == EAGAIN && total && !is_told && leave_to_teller((Stock *)self->stock)) {
                is_told = 1;
                continue;
            }
            is_told = 0;
        }
        if (got <= 0)
            return total ? total : got;
        total += got;
    } while (!self->refused && !is_to_tell(self));
    return total;
}

static PyObject *fields(const Segment *one)
{
    return Py_BuildValue("KIIIIIK", (unsigned long long)one->transfer, one->page, one->stream, 0, one->bytes,
                         one->bytes, (unsigned long long)one->checksum);
}

PyDoc_STRVAR(reader_receive_doc,
             "receive(fd, wait_s)\n--\n\n"
             "Receive segments as long as there are buffers for them, until there is something to do: take_full() first.\n\n"
             "Returns the bytes received, 0 at the end of the stream; the header fields of the segment that is being\n"
             "received, or None; and headers that Python has to read.");

static PyObject *reader_receive(PyObject *object, PyObject *args)
{
    Reader *self = (Reader *)object;
    int fd;
    double wait_s;
    if (!PyArg_ParseTuple(args, "id:receive", &fd, &wait_s))
        return NULL;
    if (!(wait_s >= 0 && wait_s < 1e6)) {
        PyErr_SetString(PyExc_ValueError, "wait_s is out of range");
        return NULL;
    }
    ssize_t total;
    for (;;) {
        PyThreadState *state = PyEval_SaveThread();
        int64_t began = lanes_now_ns();
        total = read_on(self, fd, (int64_t)(wait_s * 1e9));
        int error = errno;
        if (total > 0) { /* what comes in about a millisecond is waited for together */
            int64_t rate = (int64_t)total * 1000000 / (lanes_now_ns() - began + 1);
            self->piece_bytes = (size_t)(rate < LEAST_PIECE ? LEAST_PIECE : rate > MOST_PIECE ? MOST_PIECE : rate);
        }
        PyEval_RestoreThread(state);
        if (total >= 0)
            break;
        if (error != EINTR) {
            errno = error;
            return PyErr_SetFromErrno(PyExc_OSError);
        }
        if (PyErr_CheckSignals() < 0)
            return NULL;
    }
    PyObject *coming = self->burst.count ? fields(&self->coming[self->burst.done]) : Py_NewRef(Py_None);
    PyObject *rest = PyBytes_FromStringAndSize((char *)self->headers, self->refused ? (Py_ssize_t)self->headers_filled : 0);
    if (self->refused) {
        self->refused = 0;
        self->headers_filled = 0;
        self->headers_wanted = HEADER_BYTES;
    }
    return Py_BuildValue("nNN", (Py_ssize_t)total, coming, rest);
}

PyDoc_STRVAR(abandon_doc, "abandon()\n--\n\n"
                          "Nothing more is received here: (transfer, stream, buffer) of each that was not filled.");

static PyObject *reader_abandon(PyObject *object, PyObject *args)
{
    Reader *self = (Reader *)object;
    PyObject *list = PyList_New(0);
    for (size_t index = self->burst.done; index < self->burst.count; index++) {
        Segment *segment = &self->coming[index];
        PyObject *buffer = lanes_give_back((Stock *)self->stock, segment->loan);
        PyObject *one = list == NULL
            ? NULL
            : Py_BuildValue("KIO", (unsigned long long)segment->transfer, segment->stream, buffer);
        Py_DECREF(buffer);
        if (list != NULL && (one == NULL || PyList_Append(list, one) < 0))
            Py_CLEAR(list);
        Py_XDECREF(one);
    }
    self->burst.count = self->burst.done = self->taken = 0;
    return list;
}

static void reader_dealloc(PyObject *object)
{
    Reader *self = (Reader *)object;
    for (size_t index = self->taken; index < self->burst.count; index++)
        lanes_free_loan((Stock *)self->stock, self->coming[index].loan);
    if (self->burst.running != NULL)
        lanes_hash_free(self->burst.running);
    Py_XDECREF(self->stock);
    lanes_free_object(object);
}

PyObject *lanes_make_reader(PyObject *object, PyObject *args)
{
    Py_ssize_t lane;
    if (!PyArg_ParseTuple(args, "n:reader", &lane))
        return NULL;
    if (lane < 0 || lane >= MAX_LANES) {
        PyErr_Format(PyExc_ValueError, "a reader is of one of %d lanes", MAX_LANES);
        return NULL;
    }
    PyObject *type = PyObject_GetAttrString(PyType_GetModule(Py_TYPE(object)), "Reader");
    Reader *self = type != NULL ? (Reader *)PyType_GenericAlloc((PyTypeObject *)type, 0) : NULL;
    Py_XDECREF(type);
    if (self == NULL)
        return NULL;
    self->stock = Py_NewRef(object);
    self->lane = (size_t)lane;
    self->burst.payloads = self->payloads;
    self->burst.sums = self->sums;
    self->headers_wanted = HEADER_BYTES;
    self->piece_bytes = LEAST_PIECE;
    self->burst.running = lanes_hash_create();
    if (self->burst.running == NULL) {
        Py_DECREF((PyObject *)self);
        return PyErr_NoMemory();
    }
    return (PyObject *)self;
}

/* ---- the type */

static PyMethodDef reader_methods[] = {
    {"receive", reader_receive, METH_VARARGS, reader_receive_doc},
    {"abandon", reader_abandon, METH_NOARGS, abandon_doc},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot reader_slots[] = {
    {Py_tp_doc, "Receives the segments of one connection into buffers of a stock."},
    {Py_tp_methods, reader_methods},
    {Py_tp_dealloc, reader_dealloc},
    {0, NULL},
};

PyType_Spec lanes_reader_spec = {
    .name = "lynx_net.aio._lanes.Reader",
    .basicsize = sizeof(Reader),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = reader_slots,
};
