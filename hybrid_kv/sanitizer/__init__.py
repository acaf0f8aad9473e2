"""A shadow of the cache: the content of every slot and page, followed from the requests' tokens.

The shadow of a token's K/V, of a convolution window and of an SSM state is the hash of *all tokens
up to it*. What a step reads must be the prefix of the request that reads it; what it writes is that
prefix, one token longer at a time. Which slots and blocks are read and written is taken from what
the model gets (slots, block tables, `MambaMetadata`); what they should hold follows from the
request's token ids alone. So neither the block tables, nor the metadata builders, nor the block
hashes are trusted, and the first broken rule is named before the model runs:

- `input-token`, `position`, `row-length`: the model gets other tokens, positions or lengths than
  the request has; `layer-metadata`: a layer gets other metadata than its group.
- `read-slot`, `read-window`, `read-state`: what is read is not the request's prefix; `read-unheld`:
  the block belongs to another request.
- `window-start`: a row of a sliding window is read from before its window, or from after its start.
  A block that was given back and is still in it is `read-unheld`.
- `initial-state`: a row at position 0 reads a state, or a later one does not.
- `write-shared`, `write-unheld`, `write-twice`, `write-padding`: a block is written that others may
  read, that is not the request's, that another token of the step writes, or that no token owns.
- `pad-slot`, `pad-row`: padding points at a live slot or block. `index-range`: an index is outside
  its array.
- `accept`, `copy-rejected`, `copy-state`, `copy-bytes`: accepted drafts, and the copies of boundary
  states.
- `publish-unaccepted`, `publish-unheld`, `publish-slots`, `publish-state`: a published block is not
  exactly its tokens, all of them accepted. `hit-unpublished`, `hit-overwritten`, `hit-prefix`,
  `load-bytes`: a hit is not that. Of a hit that ends inside a block all slots after its end count
  as empty: `read-slot` names who reads one. `copy-bytes`: the copy for it has not arrived, or its
  source was overwritten before.
- In scheme `recompute` `read-history`, `history-length`, `ring-row`, `ring-full`: what a decode
  recomputes from its ring is not what follows its state, or the ring is not its own.
  `flush-unaccepted`, `flush-boundary`, `flush-shared`, `flush-unheld`: what is flushed was not
  accepted, passes the end of a block, or goes where others may read or write. `publish-unflushed`:
  a block is published before its state is written. `finalize-lost`: its request ends before that.
- `allocate-held`, `free-held`, `free-unheld`, `free-leak`, `evict-findable`: the life of a block.
- `draft-slot`: a drafting head writes where the target has another token, or none at that place of
  a block. Its layers write in passes of their own, and only where they write is checked. What a
  block drafter did not store is empty: `read-slot` names who reads it.

Fresh blocks are poisoned: bytes 0xFF are NaN in every float format and -1 in integers.

`follow.py` hears what the engine does. `shadow.py` is what it keeps in mind, `ledger.py` who holds
which block, the checks that all rules share and what is printed, `rules_….py` the rules of one kind
of layer or scheme each.
"""

from hybrid_kv.sanitizer.follow import Sanitizer
from hybrid_kv.sanitizer.ledger import SanitizerError
from hybrid_kv.sanitizer.shadow import DraftLayers
