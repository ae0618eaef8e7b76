// Suffix automaton over the tokens of one sequence, with a C interface (executor/speculation/suffix.py).
//
// After each token it knows the longest suffix of the tokens that occurred before, and where: the suffix link of the
// state of all tokens. Online construction after Blumer et al. (1985) in amortized constant time per token: n tokens
// have fewer than 2n states and 3n edges, and a clone copies only edges that stay. A state takes 16 bytes, an edge 16
// and its place in the hash table 4 at a load of 3/8 to 3/4.

#include <algorithm>
#include <cstdint>
#include <new>
#include <vector>

namespace {

constexpr int32_t NONE = -1;
constexpr size_t FEWEST_PLACES = 16;
// Shorter suffixes that learn their newest end with each token, so that a match is a recent one.
constexpr int MAX_ENDS_SET = 8;

struct State {
    int32_t length;      // of its longest string
    int32_t link;        // the state of the longest suffix that occurs at more ends; NONE for the root
    int32_t first_edge;  // NONE: none
    int32_t end;         // number of tokens up to an occurrence, a recent one
};

struct Edge {
    int32_t state, token, target, next;  // next: another edge of the state; NONE: none
};

class Automaton {
  public:
    explicit Automaton(int64_t max_tokens) : max_tokens_(max_tokens) { clear(); }

    void extend(const int32_t* ids, int64_t number) {
        if (number > max_tokens_) {
            ids += number - max_tokens_;
            number = max_tokens_;
        }
        if ((int64_t)ids_.size() + number > max_tokens_) forget(std::max<int64_t>(max_tokens_ / 2 - number, 0));
        for (int64_t i = 0; i < number; ++i) append(ids[i]);
    }

    // Writes at most `limit` ids that followed the match, and returns their number. After the newest token the text
    // since the match repeats.
    int64_t propose(int32_t* ids, int64_t limit, int64_t* match_length) const {
        *match_length = match_length_;
        if (match_length_ == 0) return 0;
        const int64_t period = (int64_t)ids_.size() - match_end_;
        for (int64_t i = 0, from = 0; i < limit; ++i, from = from + 1 == period ? 0 : from + 1)
            ids[i] = ids_[match_end_ + from];
        return limit;
    }

    void clear() {
        ids_.clear();
        states_.assign(1, State{0, NONE, NONE, 0});
        edges_.clear();
        places_.assign(FEWEST_PLACES, NONE);
        last_ = match_length_ = match_end_ = 0;
    }

    int64_t num_bytes() const {
        return sizeof(*this) + ids_.capacity() * sizeof(int32_t) + states_.capacity() * sizeof(State) +
               edges_.capacity() * sizeof(Edge) + places_.capacity() * sizeof(int32_t);
    }

  private:
    void forget(int64_t num_kept) {
        num_kept = std::min<int64_t>(num_kept, ids_.size());
        const std::vector<int32_t> kept(ids_.end() - num_kept, ids_.end());
        clear();
        for (const int32_t id : kept) append(id);
    }

    void append(int32_t token) {
        ids_.push_back(token);
        const int32_t end = (int32_t)ids_.size();
        const int32_t made = add_state({states_[last_].length + 1, NONE, NONE, end});
        int32_t state = last_;
        int32_t edge = NONE;
        while (state != NONE && (edge = find(state, token)) == NONE) {
            add_edge(state, token, made);
            state = states_[state].link;
        }
        states_[made].link = state == NONE ? 0 : target_of_length(state, edge);
        last_ = made;
        const State& match = states_[states_[made].link];
        match_length_ = match.length;
        match_end_ = match.end;
        state = states_[made].link;
        for (int i = 0; i < MAX_ENDS_SET && state != 0; ++i, state = states_[state].link) states_[state].end = end;
    }

    // Returns the state of the state's longest string and the edge's token, splitting the edge's target if that has
    // longer ones.
    int32_t target_of_length(int32_t state, int32_t edge) {
        const int32_t token = edges_[edge].token, target = edges_[edge].target;
        const int32_t length = states_[state].length + 1;
        if (states_[target].length == length) return target;
        const int32_t clone = add_state({length, states_[target].link, NONE, states_[target].end});
        for (int32_t other = states_[target].first_edge; other != NONE; other = edges_[other].next)
            add_edge(clone, edges_[other].token, edges_[other].target);
        states_[target].link = clone;
        while (state != NONE && (edge = find(state, token)) != NONE && edges_[edge].target == target) {
            edges_[edge].target = clone;
            state = states_[state].link;
        }
        return clone;
    }

    int32_t add_state(State state) {
        states_.push_back(state);
        return (int32_t)states_.size() - 1;
    }

    void add_edge(int32_t state, int32_t token, int32_t target) {
        if (4 * (edges_.size() + 1) > 3 * places_.size()) {
            places_.assign(2 * places_.size(), NONE);
            for (size_t i = 0; i < edges_.size(); ++i) places_[place(edges_[i].state, edges_[i].token)] = (int32_t)i;
        }
        edges_.push_back({state, token, target, states_[state].first_edge});
        states_[state].first_edge = (int32_t)edges_.size() - 1;
        places_[place(state, token)] = (int32_t)edges_.size() - 1;
    }

    int32_t find(int32_t state, int32_t token) const { return places_[place(state, token)]; }

    // Returns the index of the edge's place, or of the free one where it belongs.
    size_t place(int32_t state, int32_t token) const {
        uint64_t key = (uint64_t)(uint32_t)state << 32 | (uint32_t)token;
        key = (key ^ key >> 32) * 0x9e3779b97f4a7c15u;
        key = (key ^ key >> 29) * 0xbf58476d1ce4e5b9u;
        const size_t mask = places_.size() - 1;
        for (size_t i = (key ^ key >> 32) & mask;; i = (i + 1) & mask)
            if (places_[i] == NONE || (edges_[places_[i]].state == state && edges_[places_[i]].token == token))
                return i;
    }

    int64_t max_tokens_;
    std::vector<int32_t> ids_;
    std::vector<State> states_;
    std::vector<Edge> edges_;
    std::vector<int32_t> places_;  // a power of two; indices of edges
    int32_t last_, match_length_, match_end_;
};

}  // namespace

extern "C" {

// Returns null without memory.
void* inflight_automaton_new(int64_t max_tokens) {
    try {
        return new Automaton(max_tokens);
    } catch (const std::bad_alloc&) {
        return nullptr;
    }
}

void inflight_automaton_free(void* automaton) { delete static_cast<Automaton*>(automaton); }

// Without memory it forgets everything: that costs drafts and nothing else. Returns 0 in that case.
int64_t inflight_automaton_extend(void* automaton, const int32_t* ids, int64_t number) {
    try {
        static_cast<Automaton*>(automaton)->extend(ids, number);
        return 1;
    } catch (const std::bad_alloc&) {
        static_cast<Automaton*>(automaton)->clear();
        return 0;
    }
}

int64_t inflight_automaton_propose(const void* automaton, int32_t* ids, int64_t limit, int64_t* match_length) {
    return static_cast<const Automaton*>(automaton)->propose(ids, limit, match_length);
}

int64_t inflight_automaton_bytes(const void* automaton) {
    return static_cast<const Automaton*>(automaton)->num_bytes();
}

}  // extern "C"
