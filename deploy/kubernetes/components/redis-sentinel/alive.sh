# Liveness of a Redis server. Fails if it does not answer, or if it is a replica that has lost its link to a master that is
# not the Sentinels' master: a server that started during a failover may be unknown to the Sentinels, which then never
# correct it. Restarted, it asks them again. Where no Sentinel answers, the link does not count.
set -eu
info=$(REDISCLI_AUTH="$SENTINEL_PASSWORD" timeout 3 valkey-cli --no-auth-warning --user sentinel -h "$POD_IP" -p 6379 info replication | tr -d '\r')
field() { printf '%s\n' "$info" | sed -n "s/^$1://p"; }
[ -n "$(field role)" ]
if [ "$(field master_link_status)" != down ]; then exit 0; fi
FIRST_MASTER=$(field master_host)
. /etc/redis/conf/master.sh
[ "$master" = "$(field master_host)" ]
