"""pgpreemptcheck: is this host's PostgreSQL exposed to the Linux 7.0 preemption regression?"""

__version__ = "0.1.0"
