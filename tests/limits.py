"""Time limits of tests, which no load of the machine reaches."""

# only ends a test that hangs: on a busy machine, everything takes many times as long
HANG_S = 600

# longer than a test may take: what waits for such a limit instead of an event hangs
NEVER_S = 10 * HANG_S
