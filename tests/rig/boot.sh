#!/bin/sh
# The first process of a machine for tests: systemd with no units but those that a test writes. It runs in namespaces of
# mounts, processes and control groups of its own, below the world of tests/python/world.sh, so that nothing of the
# machine around it is mounted, started, cleaned or set.
set -eu
if [ -e /sys/fs/cgroup/cgroup.controllers ]; then
  umount -R /sys/fs/cgroup
  mount -t cgroup2 cgroup2 /sys/fs/cgroup
else
  umount -R /sys/fs/cgroup
  mount -t tmpfs groups /sys/fs/cgroup
  mkdir /sys/fs/cgroup/cpu /sys/fs/cgroup/cpuacct /sys/fs/cgroup/systemd /sys/fs/cgroup/unified
  mount -t cgroup -o cpu cpu /sys/fs/cgroup/cpu
  mount -t cgroup -o cpuacct cpuacct /sys/fs/cgroup/cpuacct
  mount -t cgroup -o none,name=systemd systemd /sys/fs/cgroup/systemd
  mount -t cgroup2 unified /sys/fs/cgroup/unified
fi
mount -t proc proc /proc
mount -t tmpfs -o mode=0755 run /run
mount -t tmpfs -o mode=0755 programs /usr/local/bin
mount -t tmpfs -o mode=1777 temporary /tmp
mount --rbind /dev /dev
rm -rf /etc/systemd
mkdir -p /etc/systemd/system /run/generators
for target in sysinit basic multi-user shutdown; do
  printf '[Unit]\nDescription=%s\n' "$target" > "/etc/systemd/system/$target.target"
done
# There is no journal.
mkdir /etc/systemd/system/service.d
printf '[Service]\nStandardOutput=append:/run/services.log\n' > /etc/systemd/system/service.d/log.conf
export SYSTEMD_UNIT_PATH=/etc/systemd/system SYSTEMD_GENERATOR_PATH=/run/generators
export SYSTEMD_ENVIRONMENT_GENERATOR_PATH=/run/generators container=forebay
exec "$SYSTEMD" --system --unit=multi-user.target --log-target=console --log-level=notice --show-status=no
