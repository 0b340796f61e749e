#!/bin/sh
# A machine without anything of this one's but its programs, in namespaces of the caller's: `world.sh ROOT PROGRAM...`.
# /etc is a copy, /run and /mnt are empty, memory for pools is small, and all ports of the network are free. Directories
# above those of sockets and pools belong to the one user that there is.
set -eu
root=$1
shift
mount -t tmpfs -o mode=0755 world "$root"
for place in /*; do
  case $place in
    /dev | /etc | /mnt | /run) mkdir "$root$place" ;;
    *)
      if [ -L "$place" ]; then
        cp -P "$place" "$root$place"
      elif [ -d "$place" ]; then
        mkdir "$root$place"
        mount --rbind "$place" "$root$place"
      fi
      ;;
  esac
done
# Without what only root may read.
cp -r /etc/. "$root/etc" 2> /dev/null || true
rm -f "$root/etc/forebay.toml" "$root/etc/fstab"
for device in null zero full random urandom tty; do
  touch "$root/dev/$device"
  mount --bind "/dev/$device" "$root/dev/$device"
done
mkdir "$root/dev/pts" "$root/dev/shm"
mount -t devpts -o newinstance,ptmxmode=0666 terminals "$root/dev/pts"
ln -s pts/ptmx "$root/dev/ptmx"
ln -s /proc/self/fd "$root/dev/fd"
mount -t tmpfs -o mode=1777,size=512m pools "$root/dev/shm"
for mounted in nvme0 nvme1 kv; do
  mkdir "$root/mnt/$mounted"
  mount -t tmpfs -o "mode=0755,size=128m" "$mounted" "$root/mnt/$mounted"
done
exec chroot "$root" "$@"
