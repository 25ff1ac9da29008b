// A network switch that delivers every packet after a delay, as netem does, between TAP devices that it makes.
//
//     cc -O2 delayed_switch.c -o delayed_switch && ./delayed_switch MICROSECONDS DEVICE...
//
// Prints `ready` when the devices exist. They disappear with this program, which needs root.
#define _GNU_SOURCE
#include <fcntl.h>
#include <linux/if_tun.h>
#include <net/if.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <time.h>
#include <unistd.h>

enum { MOST = 64, LARGEST = 1 << 16 };

struct packet {
    struct packet *next;
    long long due;
    int from;
    ssize_t length;
    unsigned char bytes[];
};

static long long now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1000000000LL + time.tv_nsec;
}

static int tap(const char *name) {
    struct ifreq request = {.ifr_flags = IFF_TAP | IFF_NO_PI};
    strncpy(request.ifr_name, name, IFNAMSIZ - 1);
    int device = open("/dev/net/tun", O_RDWR | O_NONBLOCK);
    if (device < 0 || ioctl(device, TUNSETIFF, &request) < 0) {
        perror(name);
        exit(1);
    }
    return device;
}

int main(int count, char **arguments) {
    long long delay = atoll(arguments[1]) * 1000;
    int ports = count - 2;
    if (ports > MOST) {
        fprintf(stderr, "at most %d devices\n", MOST);
        return 1;
    }
    struct pollfd polled[MOST];
    // The address of the host at each port, once it has sent something.
    unsigned char known[MOST][6] = {{0}};
    for (int port = 0; port < ports; port++) {
        polled[port] = (struct pollfd){.fd = tap(arguments[2 + port]), .events = POLLIN};
    }
    puts("ready");
    fflush(stdout);
    struct packet *first = NULL, **last = &first;
    static unsigned char buffer[LARGEST];
    for (;;) {
        long long left = first ? first->due - now() : 1000000000LL;
        struct timespec wait = {left > 0 ? left / 1000000000 : 0, left > 0 ? left % 1000000000 : 0};
        ppoll(polled, ports, &wait, NULL);
        for (int port = 0; port < ports; port++) {
            ssize_t length;
            // An error: nothing more has arrived, or the device is down.
            while (polled[port].revents && (length = read(polled[port].fd, buffer, LARGEST)) >= 14) {
                memcpy(known[port], buffer + 6, 6);
                struct packet *packet = malloc(sizeof *packet + length);
                if (!packet) return 1;
                *packet = (struct packet){.due = now() + delay, .from = port, .length = length};
                memcpy(packet->bytes, buffer, length);
                *last = packet;
                last = &packet->next;
            }
        }
        while (first && first->due <= now()) {
            struct packet *packet = first;
            int to = -1;
            for (int port = 0; port < ports; port++) {
                if (!memcmp(known[port], packet->bytes, 6)) to = port;
            }
            for (int port = 0; port < ports; port++) {
                // A device that is down takes nothing.
                if (port != packet->from && (to < 0 || port == to) &&
                    write(polled[port].fd, packet->bytes, packet->length) < 0) continue;
            }
            first = packet->next;
            if (!first) last = &first;
            free(packet);
        }
    }
}
