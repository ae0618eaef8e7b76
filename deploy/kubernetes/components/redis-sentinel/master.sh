# Who is master, as a Sentinel of the pool knows; the first pod where none answers, as at the very first start. Sourced.
master=""
for sentinel in $SENTINELS; do
    master=$(REDISCLI_AUTH="$SENTINEL_PASSWORD" timeout 3 valkey-cli --no-auth-warning --user sentinel -h "$sentinel" -p 26379 \
        sentinel get-master-addr-by-name inflight 2>/dev/null | head -n 1) || master=""
    # An error's text is no name.
    case "$master" in "" | *" "*) master="" ;; *) break ;; esac
done
master=${master:-$FIRST_MASTER}
