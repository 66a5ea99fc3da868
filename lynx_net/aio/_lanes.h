/* What the parts of the extension share; _lanes.c says what it is for. */
#ifndef LYNX_NET_LANES_H
#define LYNX_NET_LANES_H

#define _GNU_SOURCE
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030b0000
#include <Python.h>

#include <endian.h>
#include <errno.h>
#include <stdint.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/types.h>
#include <sys/uio.h>

enum { HEADER_BYTES = 48, SUMMED_BYTES = 40, SEGMENT = 2, LAST = 1 /* a flag */ };
enum { MAX_IOV = 512 };
enum { LINGER_NS = 2000000 }; /* after this long a receive comes back with the payloads it has completed */

/* xxh3-64, the installed xxhash package's */
extern uint64_t (*lanes_hash)(const void *, size_t);
extern int (*lanes_hash_reset)(void *);
extern int (*lanes_hash_update)(void *, const void *, size_t);
extern uint64_t (*lanes_hash_digest)(const void *);
extern void *(*lanes_hash_create)(void);
extern int (*lanes_hash_free)(void *);

/* Payloads that are being received, in order. */
typedef struct {
    struct iovec *payloads;
    size_t count;
    uint64_t *sums;
    size_t done;   /* payloads that are full */
    size_t filled; /* bytes of the next */
    void *running; /* hash of the next, if it comes in pieces */
} Receiving;

int64_t lanes_now_ns(void);
void lanes_account(Receiving *one, size_t got);
ssize_t lanes_receive_piece(int fd, const Receiving *one, size_t most, size_t *wanted);
ssize_t lanes_receive_or_wait(int fd, void *to, size_t bytes, int64_t wait_ns);

extern PyMethodDef lanes_receive_methods[];
int lanes_add_stock(PyObject *module);

#endif
