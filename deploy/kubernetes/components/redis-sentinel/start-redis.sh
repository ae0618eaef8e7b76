# Starts as a replica of whom the Sentinels call master, or as the master. The passwords are in the environment and a
# file of this pod's own, never in arguments.
set -eu
umask 077
. /etc/redis/conf/master.sh
{
    cat /etc/redis/conf/redis.conf
    echo "masterauth $REPLICA_PASSWORD"
    echo "replica-announce-ip $SELF"
    if [ "$master" != "$SELF" ]; then echo "replicaof $master 6379"; fi
} >/tmp/redis.conf
exec valkey-server /tmp/redis.conf
