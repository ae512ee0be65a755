"""A server with a wrong clock: a preloaded library of a dozen lines adds seconds to the time of day."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

OFFSET = "CHAOS_CLOCK_OFFSET_S"

_SOURCE = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <sys/time.h>
#include <time.h>
static long offset(void) { const char *text = getenv("CHAOS_CLOCK_OFFSET_S"); return text ? atol(text) : 0; }
int gettimeofday(struct timeval *now, void *zone) {
  int (*real)(struct timeval *, void *) = (int (*)(struct timeval *, void *))dlsym(RTLD_NEXT, "gettimeofday");
  int code = real(now, zone);
  now->tv_sec += offset();
  return code;
}
int clock_gettime(clockid_t clock, struct timespec *now) {
  int (*real)(clockid_t, struct timespec *) = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
  int code = real(clock, now);
  if (clock == CLOCK_REALTIME) now->tv_sec += offset();
  return code;
}
time_t time(time_t *to) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  if (to) *to = now.tv_sec;
  return now.tv_sec;
}
"""


def wrong_clock(folder: Path) -> Path | None:
    """Build the library to preload; None if there is no C compiler."""
    compiler = shutil.which("cc")
    if compiler is None:
        return None
    source, library = folder / "clock.c", folder / "clock.so"
    source.write_text(_SOURCE)
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", library, source, "-ldl"], check=True, timeout=60)
    return library
