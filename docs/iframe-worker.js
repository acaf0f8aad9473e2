// A page that was opened from a disk may not start a worker: there the search runs in a hidden frame instead.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.waiting = [];
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      this.frame.addEventListener("load", () => {
        this.inside = this.frame.contentWindow;
        this.inside.postMessage = (data) => setTimeout(() => this.answer(new MessageEvent("message", { data })));
        this.waiting.splice(0).forEach((data) => this.postMessage(data));
      }, { once: true });
      const script = document.createElement("script");
      script.src = new URL(url, document.baseURI);
      this.frame.srcdoc = script.outerHTML;
      document.body.append(this.frame);
    }

    answer(event) {
      this.dispatchEvent(event);
      if (this.onmessage) this.onmessage(event);
    }

    postMessage(data) {
      if (this.inside) this.inside.dispatchEvent(new MessageEvent("message", { data }));
      else this.waiting.push(data);
    }

    terminate() {
      this.frame.remove();
    }
  };
}
