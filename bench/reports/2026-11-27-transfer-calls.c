// What the fabric's order of system calls costs beside plain sockets: `gcc -O2 calls.c && ./a.out KIB`.
//
// Two processes on loopback, one request of 80 bytes at a time, answered with 32 bytes and KIB KiB. Five ways in turn,
// of 800 requests in each of 21 rounds; prints the median over the rounds of the time of the median request.

#define _GNU_SOURCE
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

enum { REQUEST = 80, HEADER = 32, INBOX = 4096 + 2 * HEADER, REQUESTS = 800, ROUNDS = 21, WAYS = 5 };
// How a side waits: in `recv`, or in `epoll_wait`. What the asking side receives first: all, or an inbox full.
enum { ASKER_EPOLLS = 1, INBOX_FIRST = 2, SERVER_EPOLLS = 4 };
static const int ways[WAYS] = {0, SERVER_EPOLLS, ASKER_EPOLLS, ASKER_EPOLLS | SERVER_EPOLLS,
                               ASKER_EPOLLS | SERVER_EPOLLS | INBOX_FIRST};
static const char *names[WAYS] = {"plain sockets", "the server waits in epoll", "the asker waits in epoll",
                                  "both wait in epoll", "both, and the first 4 KiB are received apart"};

static double now_us(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1e6 + t.tv_nsec / 1e3;
}

static int by_value(const void *a, const void *b) {
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static int watched(int socket) {
    int epoll = epoll_create1(0);
    struct epoll_event event = {.events = EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET};
    epoll_ctl(epoll, EPOLL_CTL_ADD, socket, &event);
    return epoll;
}

static void wait_for(int epoll) {
    struct epoll_event events[64];
    epoll_wait(epoll, events, 64, -1);
}

static void serve(int socket, char *bytes, size_t count) {
    int epoll = watched(socket), way = 0;
    for (;;) {
        char request[REQUEST], header[HEADER] = {0};
        for (ssize_t got = 0; got < REQUEST;) {
            if (way & SERVER_EPOLLS) wait_for(epoll);
            ssize_t now = recv(socket, request + got, REQUEST - got, way & SERVER_EPOLLS ? MSG_DONTWAIT : 0);
            if (now == 0) _exit(0);
            got += now > 0 ? now : 0;
        }
        way = request[0];
        struct iovec parts[2] = {{header, HEADER}, {bytes, count}};
        struct msghdr message = {.msg_iov = parts, .msg_iovlen = 2};
        ssize_t sent = sendmsg(socket, &message, 0);
        while (sent < (ssize_t)count + HEADER) sent += send(socket, bytes + sent - HEADER, count + HEADER - sent, 0);
    }
}

static void ask(int socket, int epoll, int way, char *bytes, size_t count) {
    char request[REQUEST] = {way}, inbox[INBOX];
    size_t got = 0, total = count + HEADER;
    int flags = way & ASKER_EPOLLS ? MSG_DONTWAIT : 0, is_readable = !flags;
    send(socket, request, REQUEST, 0);
    while (got < total) {
        if (!is_readable) wait_for(epoll);
        struct iovec parts[3] = {{inbox, HEADER}, {bytes, count}, {inbox + HEADER, INBOX - HEADER}};
        struct msghdr message = {.msg_iov = parts, .msg_iovlen = flags ? 3 : 2};
        size_t room = count + INBOX;
        if (way & INBOX_FIRST && got == 0) {
            parts[0].iov_len = room = INBOX;
            message.msg_iovlen = 1;
        } else if (got >= HEADER) {
            parts[0] = (struct iovec){bytes + got - HEADER, total - got};
            parts[1] = parts[2];
            message.msg_iovlen = flags ? 2 : 1;
            room = total - got + INBOX - HEADER;
        }
        ssize_t now = recvmsg(socket, &message, flags);
        if (now == 0) exit(1);
        if (way & INBOX_FIRST && got == 0 && now > HEADER) memcpy(bytes, inbox + HEADER, now - HEADER);
        got += now > 0 ? now : 0;
        is_readable = !flags || now == (ssize_t)room;
    }
}

int main(int count, char **arguments) {
    size_t bytes = (count > 1 ? atoi(arguments[1]) : 256) << 10;
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    socklen_t length = sizeof address;
    int listener = socket(AF_INET, SOCK_STREAM, 0), yes = 1;
    bind(listener, (void *)&address, length);
    getsockname(listener, (void *)&address, &length);
    listen(listener, 1);
    char *memory = malloc(bytes);
    memset(memory, 1, bytes);
    if (fork() == 0) {
        int accepted = accept(listener, 0, 0);
        setsockopt(accepted, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
        serve(accepted, memory, bytes);
    }
    int asker = socket(AF_INET, SOCK_STREAM, 0);
    connect(asker, (void *)&address, length);
    setsockopt(asker, IPPROTO_TCP, TCP_NODELAY, &yes, sizeof yes);
    int epoll = watched(asker);
    static double rounds[WAYS][ROUNDS], times[REQUESTS];
    for (int round = 0; round < ROUNDS; round++)
        for (int turn = 0; turn < WAYS; turn++) {
            int way = round % 2 ? WAYS - 1 - turn : turn;
            for (int at = 0; at < REQUESTS; at++) {
                double start = now_us();
                ask(asker, epoll, ways[way], memory, bytes);
                times[at] = now_us() - start;
            }
            qsort(times, REQUESTS, sizeof *times, by_value);
            rounds[way][round] = times[REQUESTS / 2];
        }
    for (int way = 0; way < WAYS; way++) {
        qsort(rounds[way], ROUNDS, sizeof **rounds, by_value);
        printf("%5.1f us  %s\n", rounds[way][ROUNDS / 2], names[way]);
    }
}
