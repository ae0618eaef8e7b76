# Starts a Sentinel that begins with what the others know.
set -eu
umask 077
. /etc/redis/conf/master.sh
{
    cat /etc/redis/conf/sentinel.conf
    echo "sentinel announce-ip $SELF"
    echo "sentinel monitor inflight $master 6379 2"
    echo "sentinel auth-user inflight sentinel"
    echo "sentinel auth-pass inflight $SENTINEL_PASSWORD"
    echo "sentinel sentinel-user sentinel"
    echo "sentinel sentinel-pass $SENTINEL_PASSWORD"
    echo "sentinel down-after-milliseconds inflight 5000"
    echo "sentinel failover-timeout inflight 15000"
    echo "sentinel parallel-syncs inflight 1"
} >/tmp/sentinel.conf
exec valkey-server /tmp/sentinel.conf --sentinel
